"""Under torchrun: ``torchrun --nproc-per-node 8 -m keepstep.trainer [CONFIG] [--steps N] ...``.

The options are those of ``keepstep train``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.trainer.launch import use_one_thread

use_one_thread()  # before anything imports numpy or torch

from rich.console import Console  # noqa: E402

from keepstep.ckpt.errors import CheckpointError  # noqa: E402
from keepstep.storage.errors import StoreError  # noqa: E402
from keepstep.trainer.command import train_under_torchrun  # noqa: E402
from keepstep.trainer.errors import ConfigError, TrainerError  # noqa: E402
from keepstep.trainer.job import Arguments  # noqa: E402


def parse(words: Sequence[str]) -> Arguments:
    """The arguments that `words` mean. Ends the process with status 2 if they mean none."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m keepstep.trainer")
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--run-dir", type=Path, default=Arguments().run_dir)
    parser.add_argument("--store")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--layout")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--init-from")
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="K=V")
    return Arguments(**vars(parser.parse_args(words)))


def main() -> int:
    """Train as the rank that the environment names. Returns the exit status."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.stderr.write(
            "RANK and WORLD_SIZE are not set: start this with torchrun, or use `keepstep train`\n"
        )
        return 2
    console = Console()
    try:
        train_under_torchrun(parse(sys.argv[1:]), console)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (TrainerError, CheckpointError, StoreError) as error:
        sys.stderr.write(f"rank {os.environ['RANK']}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Ranks and keepers killed at random, many times: a state common to all ranks is always there."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.kit.proof import print_report
from tests.kit.soaking import Soak, figures

WARM_UP = 20
RSS_GROWTH_MAX = 1.05


def main(arguments: list[str]) -> int:
    """Run the soak; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="kills before the first count")
    options = parser.parse_args(arguments)
    _be_single_threaded(arguments)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-soak-") as directory:
        with Soak(Path(directory), options.seed) as soak:
            for number in range(options.kills):
                soak.round(number, options.kills)
            soak.finish()
        found = figures(soak.found, options.warm_up, RSS_GROWTH_MAX)
    print_report(
        "soak",
        options.seed,
        {"kills": options.kills, **found, "seconds": round(time.monotonic() - begun_s, 1)},
    )
    return 1 if found["wrong"] else 0


def _be_single_threaded(arguments: list[str]) -> None:
    """Start this process anew if a library has made threads: they would not survive the forks."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        os.execv(sys.executable, [sys.executable, "-m", "tests.prove.soak", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

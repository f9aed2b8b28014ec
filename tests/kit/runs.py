"""Small training runs as separate processes: started, killed whole, and compared."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.keeper_process import replace_older
from keepstep.trainer.config import load_config
from keepstep.trainer.corpus import standard_library
from keepstep.trainer.hosts import shm_dir
from keepstep.trainer.metrics import FILE_NAME, read_metrics
from keepstep.trainer.tokenfile import write_token_file
from keepstep.trainer.tokenizer import ByteTokenizer

SHM_DIR = Path(f"/dev/shm/keepstep-test-{os.getpid()}")
"""Of this process's runs; each run directory has a suffix of its own. See `end_keepers`."""

SETTINGS = (
    "model.dim=32",
    "model.layers=4",
    "model.ffn_dim=64",
    "model.seq_len=16",
    "batch.global_batch=16",
    "batch.micro_batch=1",
    "optim.schedule_steps=40",
    "optim.warmup_steps=5",
    "run.evaluate_every=0",
    "run.keep=0",
    "run.patience_s=60",
    f"tiers.shm_dir={SHM_DIR}",
)
"""A model that is done with a step at once; 16 samples can be shared by dp = 1, 2, 4, 8."""

EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "applied")
"""Of a step's line, what a resumed run must repeat to the bit."""


def make_corpus(directory: Path, size_bytes: int = 60_000) -> Path:
    """Build a small token file once; its path for `data.path`."""
    path = directory / "corpus"
    write_token_file(path, ByteTokenizer(), standard_library(size_bytes))
    return path


def start(
    run_dir: Path, corpus: Path, *arguments: str, settings: Sequence[str] = (), output: Path
) -> subprocess.Popen[bytes]:
    """Start `keepstep train` on the small model; what it prints is appended to `output`."""
    words = [f"data.path={corpus}", *SETTINGS, *settings]
    command = [sys.executable, "-m", "keepstep.cli", "train", "--run-dir", str(run_dir)]
    command += [*arguments, *(part for word in words for part in ("--set", word))]
    with output.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def train(
    run_dir: Path,
    corpus: Path,
    *arguments: str,
    settings: Sequence[str] = (),
    timeout_s: float = 240,
) -> tuple[int, str]:
    """Run `keepstep train` to its end; exit status and what it printed."""
    output = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.out")
    process = start(run_dir, corpus, *arguments, settings=settings, output=output)
    try:
        status = process.wait(timeout_s)
    except BaseException:
        kill_tree(process)
        raise
    return status, output.read_text()


def kill_tree(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL the process and all below it at one moment; how many there were."""
    return kill(process, keepers=None)


def kill(process: subprocess.Popen[bytes], *, keepers: int | None) -> int:
    """SIGKILL launcher and ranks at one moment, and so many keepers (None: all); how many died."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        spared = [one for one in family if is_keeper(one)][keepers:] if keepers is not None else []
        doomed = [psutil.Process(process.pid), *(one for one in family if one not in spared)]
        for one in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(one.pid, signal.SIGKILL)
        process.wait(30)
        psutil.wait_procs(doomed[1:], timeout=30)
        return len(doomed)
    process.wait(30)
    return 0


def is_keeper(process: psutil.Process) -> bool:
    """Whether it is a keeper."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "keeper" in " ".join(process.cmdline())
    return False


def host_dirs(run_dir: Path) -> list[HostDir]:
    """The host directories in shared memory of a run that was started here."""
    return [HostDir(path) for path in sorted(_shm_dir(run_dir).glob("*"))]


def _shm_dir(run_dir: Path) -> Path:
    return shm_dir(load_config(None, [f"tiers.shm_dir={SHM_DIR}"]), run_dir)


def end_keepers(run_dir: Path | None = None) -> None:
    """End the keepers of a run that was started here (None: all), and free their memory."""
    tag = "*" if run_dir is None else _shm_dir(run_dir).name.removeprefix(f"{SHM_DIR.name}.")
    for above in SHM_DIR.parent.glob(f"{SHM_DIR.name}.{tag}"):
        for path in above.iterdir():
            replace_older(path, path.name, timeout_s=1.0)
        shutil.rmtree(above)


def wait_for_lines(process: subprocess.Popen[bytes], run_dir: Path, count: int) -> bool:
    """Until metrics.jsonl has `count` lines; False if the run ended before."""
    file = run_dir / FILE_NAME
    while process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return True
        time.sleep(0.01)
    return False


def exact_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The line that counts of each step, reduced to what must be equal to the bit."""
    return [{name: line[name] for name in EXACT} for line in read_metrics(run_dir)]


def worst_relative(a: list[dict[str, Any]], b: list[dict[str, Any]], field: str) -> float:
    """The largest relative difference of a field of two runs' lines."""
    return max(
        abs(one[field] - other[field]) / max(abs(one[field]), abs(other[field]))
        for one, other in zip(a, b, strict=True)
    )

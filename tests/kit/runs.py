"""Small training runs as separate processes: started, killed whole, and compared."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from keepstep.trainer.corpus import standard_library
from keepstep.trainer.metrics import FILE_NAME, read_metrics
from keepstep.trainer.tokenfile import write_token_file
from keepstep.trainer.tokenizer import ByteTokenizer

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
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True)]
        for one in [psutil.Process(process.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(one.pid, signal.SIGKILL)
        process.wait(30)
        psutil.wait_procs(family, timeout=30)
        return len(family) + 1
    process.wait(30)
    return 0


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

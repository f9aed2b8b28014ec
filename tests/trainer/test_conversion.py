"""What reshard and import make, a run goes on from: whole runs in several processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SMALL = {
    "model.dim": 32,
    "model.ffn_dim": 64,
    "model.seq_len": 32,
    "batch.global_batch": 8,
    "run.evaluate_every": 0,
    "run.device": "cpu",
}


def keepstep(tmp_path: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def trained(tmp_path: Path, run: str, layout: str, steps: int, *words: str) -> list[dict[str, Any]]:
    """The metrics of a run, one a step, after it was trained to `steps`."""
    pairs = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    fixed = ("--run-dir", run, "--layout", layout, "--steps", str(steps))
    keepstep(tmp_path, "train", *fixed, *pairs, *words)
    lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def numbers(metrics: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(each["step"], each["loss"], each["grad_norm"], each["samples"]) for each in metrics]


def test_a_run_goes_on_from_a_resharded_store_as_from_the_store_itself(tmp_path: Path) -> None:
    trained(tmp_path, "a", "dp=2", 2)
    keepstep(tmp_path, "reshard", "a/store", "b", "--layout", "tp=2,pp=2")
    resharded = trained(tmp_path, "c", "tp=2,pp=2", 4, "--store", "b")
    itself = trained(tmp_path, "a", "tp=2,pp=2", 4)
    assert [each["step"] for each in resharded] == [3, 4]
    assert numbers(resharded) == numbers(itself)[2:]


def test_a_run_begins_from_an_imported_model_as_from_the_run_it_was(tmp_path: Path) -> None:
    trained(tmp_path, "a", "dp=1", 2)
    keepstep(tmp_path, "export", "a/store", "hf", "--format", "hf")
    keepstep(tmp_path, "import", "hf", "b", "--format", "hf")
    shutil.rmtree(tmp_path / "hf")
    imported = trained(tmp_path, "c", "tp=2", 2, "--init-from", "b", "--weights-only")
    itself = trained(tmp_path, "d", "tp=2", 2, "--init-from", "a/store", "--weights-only")
    assert numbers(imported) == numbers(itself)
    scratch = trained(tmp_path, "e", "tp=2", 1)
    assert numbers(imported)[0] != numbers(scratch)[0]

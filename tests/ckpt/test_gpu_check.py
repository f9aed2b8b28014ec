"""`bench/gpu_check.py` where there is no GPU: it says so, and its whole path runs on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_check.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_says_so_and_has_an_exit_code_of_its_own() -> None:
    done = _run()
    assert (done.returncode, done.stdout) == (3, "")
    assert "gpu_check needs CUDA" in done.stderr


@pytest.mark.slow
def test_its_path_runs_on_the_cpu(tmp_path: Path) -> None:
    done = _run("--rehearse", "--mib", "12", "--shm-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["holds"] == {"order": True, "images": True}
    assert report["order"] == {"is_kept": True, "is_seen_to_fail": False}  # a CPU has no streams
    assert report["capture"]["gb_s"] > 0
    assert report["registration"] is None
    assert list(tmp_path.iterdir()) == []

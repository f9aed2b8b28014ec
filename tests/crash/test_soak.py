"""A slice of the soak: ranks and keepers killed at random, with acknowledgements delayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
KILLS = 6


@pytest.mark.ranks
@pytest.mark.slow
def test_after_each_kill_all_ranks_go_on_from_one_state_to_the_bit() -> None:
    shared_before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "tests.prove.soak", "--kills", str(KILLS), "--seed", str(SEED)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert sum(found["kinds"].values()) >= KILLS
    assert found["restores"] >= 4 * (KILLS - 2)
    assert found["steps_captured"] > KILLS
    ours = [name for name in set(os.listdir("/dev/shm")) - shared_before if "soak" in name]
    assert ours == []

"""A job that cannot be is refused before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.trainer.errors import ConfigError
from keepstep.trainer.job import Arguments, make_config

UNKNOWN = "gopher://host/run"


def test_a_location_that_no_store_can_be_at_is_refused() -> None:
    for arguments in (
        Arguments(store=UNKNOWN),
        Arguments(store="s3://"),
        Arguments(init_from=f"{UNKNOWN}@10"),
    ):
        with pytest.raises(ConfigError, match="cannot open the store"):
            make_config(arguments)
    make_config(Arguments(store="/none/here", init_from="/nor/there@10"))


def test_it_is_refused_as_typed_and_no_run_directory_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "keepstep.cli", "train", f"--run-dir={run_dir}"]
    done = subprocess.run(
        [*command, f"--store={UNKNOWN}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "unknown kind of store 'gopher'" in done.stderr
    assert not run_dir.exists()

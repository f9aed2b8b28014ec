"""Small file systems of a test's own. Where mounting is not allowed the test is skipped by name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs with these mount options ("size=4m", "nr_inodes=8"), at `place`, which is made."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place.mkdir()
    mounted = _run("mount", "-t", "tmpfs", "-o", options, "none", str(place))
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        done = _run("umount", "-l", str(place))
        assert done.returncode == 0, done.stderr


def remount(place: Path, options: str) -> None:
    """Change the mount options; `ro` needs that no file is open for writing."""
    done = _run("mount", "-o", f"remount,{options}", str(place))
    assert done.returncode == 0, done.stderr


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

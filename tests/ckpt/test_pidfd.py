"""Watching processes by pidfd."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keepstep.ckpt.pidfd import has_exited, watch_process
from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.process import this_process


def test_a_living_process_is_watched_until_it_exits() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pass
    fd = watch_process(this_process())
    assert fd is not None
    try:
        assert not has_exited(fd)
    finally:
        os.close(fd)
    assert watch_process(Writer(child.pid, 1)) is None


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, (1 << 64) - 1])
def test_what_is_no_pid_is_no_process(pid: int) -> None:
    """As a damaged table names it."""
    assert watch_process(Writer(pid, 1)) is None

"""Processes by pid and start time: together they name one process of this host for ever."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.ckpt.pool_table import Writer


def process_start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none.

    A pid is used again, a start time with it is not. A zombie counts as a process still.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def this_process() -> Writer:
    """This process."""
    pid = os.getpid()
    return Writer(pid, process_start_ticks(pid) or 0)


def is_running(process: Writer) -> bool:
    """Whether this very process is still there. A zombie is."""
    return process_start_ticks(process.pid) == process.ticks

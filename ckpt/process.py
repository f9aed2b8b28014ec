"""Processes by pid and start time: together they name one process of this host for ever."""

from __future__ import annotations

from pathlib import Path


def process_start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none.

    A pid is used again, a start time with it is not. A zombie counts as a process still.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])

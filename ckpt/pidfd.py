"""Watching processes of this host: a pidfd for each, readable once the process has exited.

A pid alone may be another process's by now; pid and start time together are one process for ever.
"""

from __future__ import annotations

import os
import select

from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.process import is_running


def watch_process(process: Writer) -> int | None:
    """A pidfd of this very process; None if it is gone. The caller closes it.

    Raises OSError other than that the process is gone.
    """
    if process.pid <= 0:
        return None
    try:
        fd = os.pidfd_open(process.pid)
    except (ProcessLookupError, OverflowError):  # larger than any pid: from a damaged table
        return None
    if not is_running(process) or has_exited(fd):
        os.close(fd)
        return None
    return fd


def has_exited(pidfd: int) -> bool:
    """Whether the process has exited. One that nobody has waited for yet counts as exited."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))

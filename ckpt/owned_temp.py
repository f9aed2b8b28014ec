"""Temporary directories whose names tell which process made them: `PREFIX<pid>-<ticks>`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from keepstep.ckpt.pool_table import Writer

RENDEZVOUS_PREFIX = "keepstep-rendezvous-"
"""Where the ranks of one launcher meet."""


def owned_directories(parent: Path) -> Iterator[tuple[Path, Writer]]:
    """The directories of this kind in `parent`, with who made each. By name; not opened."""
    for path in sorted(parent.glob(f"{RENDEZVOUS_PREFIX}*")):
        pid, _, ticks = path.name.removeprefix(RENDEZVOUS_PREFIX).partition("-")
        if pid.isdecimal() and ticks.isdecimal():
            yield path, Writer(int(pid), int(ticks))

"""`events.jsonl`: what happened to a run, with time, who, and why. Append-only.

Kinds: started, resumed, config_changed, checkpoint_passed_over, checkpoint_committed,
checkpoint_failed, checkpoint_waited, retired, retention_failed, evaluated, skipped, stopped,
refused, failed, repaired.

Of keepers: keeper_started, keeper_ended, adopted, image_corrupt, capture_lost, capture_refused,
slot_damaged, memory_short, client_refused, unserved, disk_unserved, disk_copy_refused, port_taken,
hint_failed, unprotected, protected; and those of their drains.
"""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path
from typing import Any

from keepstep.ckpt.jsonlines import JsonLines, parse_lines, read_lines

FILE_NAME = "events.jsonl"


class Events:
    """The event file of a run, open for appending by one process."""

    def __init__(self, run_dir: Path, *, role: str, rank: int | None = None) -> None:
        """Open the file.

        Args:
            run_dir: the run directory.
            role: "launcher", "rank" or "keeper".
            rank: of a rank.
        """
        self._lines = JsonLines(run_dir / FILE_NAME)
        self._who: dict[str, Any] = {"role": role, "host": socket.gethostname(), "pid": os.getpid()}
        if rank is not None:
            self._who["rank"] = rank

    def append(self, kind: str, reason: str, **details: object) -> None:
        """Add an event of `kind`, with its reason in words and its figures."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._lines.append({"time": now, "event": kind, **self._who, "reason": reason, **details})

    def repair(self) -> int:
        """Cut a torn last line off; only for the one who holds the run directory's lock."""
        return self._lines.repair()

    def sync(self) -> None:
        """Make the lines durable."""
        self._lines.sync()


class EventTail:
    """What is appended to an event file from now on, whoever appends it."""

    def __init__(self, run_dir: Path) -> None:
        """Begin at the end of the file, which may be missing still."""
        self._path = run_dir / FILE_NAME
        self._at = self._path.stat().st_size if self._path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """The whole lines that have come since the last call. Raises LinesError for a wrong one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return parse_lines(whole, self._path)


def read_events(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """All events, oldest first; only those of `kind` if given."""
    return [
        line
        for line in read_lines(run_dir / FILE_NAME)
        if kind is None or line.get("event") == kind
    ]

"""`events.jsonl`: what happened to a run, with time, who, and why. Append-only.

Kinds, by who tells them:

    launcher   refused, failed, repaired, display_lost, keeper_died, keeper_hung, keeper_failed,
               keeper_lingers
    rank       started, resumed, config_changed, checkpoint_passed_over, state_passed_over,
               copy_passed_over, snapshot_incomplete, evaluated, skipped, capture_skipped,
               capturing_again, capture_failed, capture_mode, put_off, waiting, stopped
    keeper     keeper_started, adopted, keeper_ended, capture_lost, checkpoint_committed,
               checkpoint_failed, commit_recovered, retired, retention_failed, superseded,
               drain_failed, drain_recovered, drain_gave_up, drain_superseded, drain_lost, corrupt,
               disk_slow, unprotected, protected, and others that say what they are
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

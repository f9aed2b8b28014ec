"""A keeper's events: lines in the run's event log, from any thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from keepstep.ckpt.events import FILE_NAME, Events
from keepstep.ckpt.jsonlines import LinesError
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import Refusal


class KeeperEvents:
    """Appends events. One that cannot be written goes to stderr: no event stops a keeper.

    Raises Refusal for a configuration that names another file than an event log.
    """

    def __init__(self, config: KeeperConfig) -> None:
        self._host = config.host
        self._lock = threading.Lock()
        self._events: Events | None = None
        if config.events_path:
            path = Path(config.events_path)
            if path.name != FILE_NAME:
                raise Refusal(
                    f"events_path: expected a path that ends in {FILE_NAME}, found {path}"
                )
            try:
                self._events = Events(path.parent, role="keeper")
            except LinesError as error:
                self._print("events_lost", str(error))

    def tell(self, kind: str, reason: str, **details: object) -> None:
        """Append an event of `kind`, with its reason in words and its figures."""
        with self._lock:
            if self._events is None:
                self._print(kind, reason)
                return
            try:
                self._events.append(kind, reason, **{"of_host": self._host, **details})
            except LinesError as error:
                self._print(kind, f"{reason} ({error})")

    def _print(self, kind: str, reason: str) -> None:
        sys.stderr.write(f"{kind}: {reason}\n")
        sys.stderr.flush()

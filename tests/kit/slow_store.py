"""Stores that are slow, or fail for as long as a test wants."""

from __future__ import annotations

import threading

from tests.kit.faulty_store import FaultyStore

from keepstep.storage.errors import StoreError, Transient
from keepstep.storage.store import Store

WAIT_S = 60.0


class Gate(FaultyStore):
    """Operations of one kind wait until the gate is opened.

    Attributes:
        opened: set it to let them through.
        entered: is set when one waits.
    """

    def __init__(self, inner: Store, operation: str, key_part: str = "") -> None:
        super().__init__(inner)
        self._operation = operation
        self._key_part = key_part
        self.opened = threading.Event()
        self.entered = threading.Event()

    def begin(self, operation: str, key: str) -> None:
        if operation == self._operation and self._key_part in key and not self.opened.is_set():
            self.entered.set()
            assert self.opened.wait(WAIT_S)


class Outage(FaultyStore):
    """Every operation fails with `kind` while `is_out`."""

    def __init__(self, inner: Store, kind: type[StoreError] = Transient) -> None:
        super().__init__(inner)
        self.is_out = True
        self.kind = kind

    def begin(self, operation: str, key: str) -> None:
        if self.is_out:
            raise self.kind(f"{operation} {key}: the store is out", operation=operation, key=key)

"""A store that misbehaves on demand, around a real one.

Operations are counted from 0 in the order in which they are called; a fault names the operation it
strikes. So a test can run once without faults, read `calls`, and then strike each call in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from keepstep.storage.errors import OutcomeUnknown, StoreError, Transient
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo, Store
from keepstep.storage.writer import as_bytes_view

T = TypeVar("T")

WRITES = frozenset({"put", "put_stream", "put_if_absent", "delete", "sweep"})


class Crashed(BaseException):
    """The process died here. Not an Exception: nothing may catch it and go on."""


class Action(Enum):
    """What goes wrong."""

    FAIL = auto()
    """Nothing happens, and the error is raised."""
    LOSE_ANSWER = auto()
    """It happens, and the error is raised."""
    CRASH_BEFORE = auto()
    """The process dies; nothing has happened. Every later call dies too."""
    CRASH_AFTER = auto()
    """It happens, then the process dies."""
    TEAR = auto()
    """A put stores half of its bytes under the final key, then the process dies: a bad store."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One misfortune: strikes calls number `at` to `at + times - 1`, counted among `operations`."""

    action: Action
    at: int = 0
    times: int = 1
    operations: frozenset[str] | None = None
    """Only these are counted; None: all."""
    key_prefix: str = ""
    """Only keys that begin so are counted."""
    error: type[StoreError] | None = None
    """For FAIL (default Transient) and LOSE_ANSWER (default OutcomeUnknown)."""
    errno: int | None = None


@dataclass(slots=True)
class _Counted:
    fault: Fault
    seen: int = field(default=0)

    def strikes(self, operation: str, key: str) -> bool:
        fault = self.fault
        if fault.operations is not None and operation not in fault.operations:
            return False
        if not key.startswith(fault.key_prefix):
            return False
        self.seen += 1
        return fault.at < self.seen <= fault.at + fault.times


class FaultyStore:
    """Passes every call on to `inner`, except those that a fault strikes."""

    def __init__(self, inner: Store, *faults: Fault) -> None:
        self._inner = inner
        self._faults = [_Counted(fault) for fault in faults]
        self._lock = threading.Lock()
        self._dead = False
        self.calls: list[tuple[str, str]] = []
        """Operation and key of each call so far."""

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put(self, key: str, data: Buffer) -> None:
        self._do("put", key, lambda: self._inner.put(key, data), data)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        self._do("put_stream", key, lambda: self._inner.put_stream(key, chunks, size_bytes))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._do("put_if_absent", key, lambda: self._inner.put_if_absent(key, data), data)

    def get(self, key: str, bytes_max: int) -> bytes:
        return self._do("get", key, lambda: self._inner.get(key, bytes_max))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self._inner.get_range(key, offset, length))

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        self._do("read_into", key, lambda: self._inner.read_into(key, offset, target))

    def stat(self, key: str) -> ObjectInfo:
        return self._do("stat", key, lambda: self._inner.stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._do("list", prefix, lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._inner.delete(key))

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._do("leftovers", prefix, lambda: self._inner.leftovers(prefix))

    def sweep(self, leftover: ObjectInfo) -> None:
        self._do("sweep", leftover.key, lambda: self._inner.sweep(leftover))

    def _do(self, operation: str, key: str, call: Callable[[], T], data: Buffer = b"") -> T:
        with self._lock:
            if self._dead:
                raise Crashed(f"{operation} {key}: this process is dead")
            self.calls.append((operation, key))
            struck = [c.fault for c in self._faults if c.strikes(operation, key)]
        if not struck:
            return call()
        return self._strike(struck[0], operation, key, call, data)

    def _strike(
        self, fault: Fault, operation: str, key: str, call: Callable[[], T], data: Buffer
    ) -> T:
        if fault.action is Action.FAIL:
            raise self._error(fault, fault.error or Transient, operation, key)
        if fault.action is Action.CRASH_BEFORE:
            raise self._crash(operation, key, "before")
        if fault.action is Action.TEAR:
            half = as_bytes_view(data)
            self._inner.put(key, half[: half.nbytes // 2])
            raise self._crash(operation, key, "halfway through")
        with suppress(StoreError):  # an answer too, and it does not arrive either
            call()
        if fault.action is Action.LOSE_ANSWER:
            raise self._error(fault, fault.error or OutcomeUnknown, operation, key)
        raise self._crash(operation, key, "after")

    def _crash(self, operation: str, key: str, when: str) -> Crashed:
        self._dead = True
        return Crashed(f"{when} {operation} {key}")

    def _error(self, fault: Fault, kind: type[StoreError], operation: str, key: str) -> StoreError:
        return kind(
            f"{operation} {key!r}: injected {kind.__name__}",
            operation=operation,
            key=key,
            where=self.url,
            errno=fault.errno,
        )

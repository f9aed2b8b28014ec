"""A store that misbehaves on demand, around a real one.

Operations are counted from 0 in the order in which they are called; a fault names the operation it
strikes. So a test can run once without faults, read `calls`, and then strike each call in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar, cast

from keepstep.storage.errors import OutcomeUnknown, StoreError, Transient
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo, Store
from keepstep.storage.writer import as_bytes_view

T = TypeVar("T")

_PATIENCE_S = 120.0

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
    SLOW = auto()
    """It takes `seconds` longer."""
    HANG = auto()
    """Nothing happens until `release`; then the error is raised."""
    LAND_LATE = auto()
    """The error is raised at once; at `land` it happens all the same."""
    SHORT = auto()
    """A read gives half of the bytes, a put stores half; both say that all is well: a bad store."""
    DAMAGE = auto()
    """One bit of what is read or put is flipped, and all seems well: a bad store or network."""


_UNNOTICED = frozenset({Action.SLOW, Action.SHORT, Action.DAMAGE})


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
    """For FAIL (default Transient); LOSE_ANSWER, HANG and LAND_LATE (default OutcomeUnknown)."""
    errno: int | None = None
    seconds: float = 0.0


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
        self._released = threading.Event()
        self._hung = threading.Event()
        self._late: list[Callable[[], object]] = []
        self.calls: list[tuple[str, str]] = []
        """Operation and key of each call so far."""

    @property
    def is_dead(self) -> bool:
        """Whether a fault has struck that the process dies of."""
        return self._dead

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def wait_hung(self, timeout_s: float) -> bool:
        """Until some call hangs; False if none does by then."""
        return self._hung.wait(timeout_s)

    def release(self) -> None:
        """Let what hangs, and all that would, end with its error."""
        self._released.set()

    def land(self) -> None:
        """Let what was given up for lost happen now, in order. Errors have nobody to go to."""
        late, self._late = self._late, []
        for call in late:
            with suppress(StoreError):
                call()

    def put(self, key: str, data: Buffer) -> None:
        self._do("put", key, lambda data: self._inner.put(key, data), data)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        self._do("put_stream", key, lambda _: self._inner.put_stream(key, chunks, size_bytes))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._do("put_if_absent", key, lambda data: self._inner.put_if_absent(key, data), data)

    def get(self, key: str, bytes_max: int) -> bytes:
        return self._do("get", key, lambda _: self._inner.get(key, bytes_max))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._do("get_range", key, lambda _: self._inner.get_range(key, offset, length))

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        def read(_: Buffer) -> bytes:
            self._inner.read_into(key, offset, target)
            return bytes(target)

        data = self._do("read_into", key, read)
        if data:
            as_bytes_view(target)[:] = data.ljust(target.nbytes, b"\0")

    def stat(self, key: str) -> ObjectInfo:
        return self._do("stat", key, lambda _: self._inner.stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._do("list", prefix, lambda _: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda _: self._inner.delete(key))

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._do("leftovers", prefix, lambda _: self._inner.leftovers(prefix))

    def sweep(self, leftover: ObjectInfo) -> None:
        self._do("sweep", leftover.key, lambda _: self._inner.sweep(leftover))

    def begin(self, operation: str, key: str) -> None:
        """Called before each operation; a store made from this one may wait or raise here."""

    def _do(self, operation: str, key: str, call: Callable[[Buffer], T], data: Buffer = b"") -> T:
        """Call, with the data of a put; or what a fault makes of it."""
        self.begin(operation, key)
        with self._lock:
            if self._dead:
                raise Crashed(f"{operation} {key}: this process is dead")
            self.calls.append((operation, key))
            struck = [c.fault for c in self._faults if c.strikes(operation, key)]
        if not struck:
            return call(data)
        return self._strike(struck[0], operation, key, call, data)

    def _strike(
        self, fault: Fault, operation: str, key: str, call: Callable[[Buffer], T], data: Buffer
    ) -> T:
        if fault.action is Action.FAIL:
            raise self._error(fault, fault.error or Transient, operation, key)
        if fault.action is Action.CRASH_BEFORE:
            raise self._crash(operation, key, "before")
        if fault.action is Action.TEAR:
            self._inner.put(key, _halved(data))
            raise self._crash(operation, key, "halfway through")
        if fault.action in _UNNOTICED:
            return self._misdo(fault, call, data)
        if fault.action is Action.HANG:
            self._hung.set()
            assert self._released.wait(_PATIENCE_S), f"nobody released {operation} {key}"
            raise self._error(fault, fault.error or OutcomeUnknown, operation, key)
        if fault.action is Action.LAND_LATE:
            kept = bytes(as_bytes_view(data))  # the caller may change it before it lands
            self._late.append(lambda: call(kept))
            raise self._error(fault, fault.error or OutcomeUnknown, operation, key)
        with suppress(StoreError):  # an answer too, and it does not arrive either
            call(data)
        if fault.action is Action.LOSE_ANSWER:
            raise self._error(fault, fault.error or OutcomeUnknown, operation, key)
        raise self._crash(operation, key, "after")

    def _misdo(self, fault: Fault, call: Callable[[Buffer], T], data: Buffer) -> T:
        if fault.action is Action.SLOW:
            time.sleep(fault.seconds)
            return call(data)
        spoil = _halved if fault.action is Action.SHORT else _flipped
        answer = call(spoil(data))
        return cast("T", spoil(answer)) if isinstance(answer, bytes) else answer

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


def _halved(data: Buffer) -> bytes:
    view = as_bytes_view(data)
    return bytes(view[: view.nbytes // 2])


def _flipped(data: Buffer) -> bytes:
    flipped = bytearray(as_bytes_view(data))
    if flipped:
        flipped[len(flipped) // 2] ^= 1
    return bytes(flipped)

"""Trying a store out: does it keep two writers apart, how fast does it answer, what time has it.

Everything is written under one prefix and removed again.
"""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from keepstep.storage.errors import AlreadyExists, StoreError
from keepstep.storage.store import Store

TRIAL_PREFIX = "doctor/"
RACING_WRITERS = 4
_PUTS = 5
_OBJECT_BYTES = 4_096
_TICK_S = 0.01
"""A file's time is that of the kernel's last tick."""


@dataclass(frozen=True, slots=True)
class AppendTrial:
    """What came of several writers that wanted one key at the same moment.

    Attributes:
        writers: how many there were.
        winners: how many were told that the key was theirs; 1 is right.
        is_kept: the object has a winner's bytes, and a later writer was refused.
        append_ms: of one put_if_absent, alone; the median.
    """

    writers: int
    winners: int
    is_kept: bool
    append_ms: float

    @property
    def is_good(self) -> bool:
        """Whether a log may be kept there."""
        return self.winners == 1 and self.is_kept


@dataclass(frozen=True, slots=True)
class PutTrial:
    """Small puts and reads, and the store's clock.

    Attributes:
        put_ms: the median of a put of 4 KiB, durable.
        get_ms: the median of reading it again.
        is_same: it gave back what it was given.
        ahead_s: how far the store's clock is ahead of this host's (its times may be whole seconds).
        within_s: `ahead_s` is right to so many seconds either way.
    """

    put_ms: float
    get_ms: float
    is_same: bool
    ahead_s: float
    within_s: float


def try_appends(store: Store, writers: int = RACING_WRITERS) -> AppendTrial:
    """Let `writers` threads race for one key by put_if_absent. Leaves nothing behind.

    Raises: StoreError, if the store cannot be asked; Permanent, if it says that it cannot do this.
    """
    prefix = f"{TRIAL_PREFIX}{secrets.token_hex(8)}/"
    race, alone = f"{prefix}race", [f"{prefix}alone-{n}" for n in range(_PUTS)]
    try:
        times_ms = []
        for key in alone:
            begun_s = time.perf_counter()
            store.put_if_absent(key, b"alone")
            times_ms.append((time.perf_counter() - begun_s) * 1_000)
        winners = _race(store, race, writers)
        data = store.get(race, 100)
        is_kept = data in winners
        with suppress(AlreadyExists):
            store.put_if_absent(race, b"late")
            is_kept = False
    finally:
        _remove(store, [race, *alone])
    return AppendTrial(writers, len(winners), is_kept, statistics.median(times_ms))


def try_puts(store: Store) -> PutTrial:
    """Put, look at and read small objects. Leaves nothing behind.

    Raises: StoreError, if one of these fails.
    """
    key = f"{TRIAL_PREFIX}{secrets.token_hex(8)}/small"
    data = secrets.token_bytes(_OBJECT_BYTES)
    puts_ms, gets_ms = [], []
    read = b""
    try:
        for _ in range(_PUTS):
            before_s, begun_s = time.time(), time.perf_counter()
            store.put(key, data)
            put_s = time.perf_counter()
            after_s = time.time()
            read = store.get(key, _OBJECT_BYTES)
            puts_ms.append((put_s - begun_s) * 1_000)
            gets_ms.append((time.perf_counter() - put_s) * 1_000)
        modified_s = store.stat(key).modified_s
    finally:
        _remove(store, [key])
    # A store that counts whole seconds has dropped up to one.
    dropped_s = 1.0 if modified_s == int(modified_s) else 0.0
    return PutTrial(
        put_ms=statistics.median(puts_ms),
        get_ms=statistics.median(gets_ms),
        is_same=read == data,
        ahead_s=modified_s + dropped_s / 2 - (before_s + after_s) / 2,
        within_s=(after_s - before_s + dropped_s) / 2 + _TICK_S,
    )


def _race(store: Store, key: str, writers: int) -> list[bytes]:
    """What the winners wrote."""
    start = threading.Barrier(writers)

    def write(number: int) -> bytes | None:
        text = b"writer %d" % number
        start.wait()
        try:
            store.put_if_absent(key, text)
        except AlreadyExists:
            return None
        return text

    with ThreadPoolExecutor(writers) as pool:
        return [text for text in pool.map(write, range(writers)) if text is not None]


def _remove(store: Store, keys: list[str]) -> None:
    for key in keys:
        with suppress(StoreError):  # the error that matters is that of the trial
            store.delete(key)

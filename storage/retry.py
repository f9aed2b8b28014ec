"""Trying again: which errors, how long apart, and until when.

Only what cannot do harm is repeated: an operation of which nothing happened (Transient), and, where
the caller says that doing it twice is the same as once, one whose outcome is unknown. A permanent
error is raised at once.

Pauses are random, so that a thousand ranks that failed together do not come back together. They are
drawn from the system's generator: Python's own is the user's, who may have seeded it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import tenacity

from keepstep.storage.errors import OutcomeUnknown, StoreError, Throttled, Transient
from keepstep.storage.keys import check_prefix
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo, Store

T = TypeVar("T")

REPEATABLE = frozenset({"put", "put_stream", "delete", "sweep"})
"""What has the same effect twice as once, as long as nobody else writes to the key.

Never put_if_absent: repeated after a lost answer it would find its own object, and call it
another's. Who appends must read what is there; `ckpt.log` does.
"""

_EXPONENT_MAX = 32


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patient to be with one operation. All in seconds.

    Attributes:
        deadline_s: no new try begins later than this after the first; the first is always made.
        pause_first_s: the pause after the first failure; doubles each time, less a random half.
        pause_max_s: no pause is longer.
        throttled_first_s: as `pause_first_s`, after the store asked for fewer requests.
    """

    deadline_s: float = 30.0
    pause_first_s: float = 0.1
    pause_max_s: float = 10.0
    throttled_first_s: float = 0.5

    def call(
        self,
        operation: Callable[[], T],
        *,
        repeats_unknown: bool,
        sleep: Callable[[float], None] = time.sleep,
    ) -> T:
        """The result of `operation`, tried again as the policy says.

        Raises:
            OutcomeUnknown: the last try failed, and one of them may have done it.
            StoreError: what the last try raised.
        """
        course = _Course(self, repeats_unknown)
        retrying = tenacity.Retrying(
            sleep=sleep,
            stop=tenacity.stop_before_delay(self.deadline_s),
            wait=course.pause_s,
            retry=tenacity.retry_if_exception(course.may_repeat),
            retry_error_callback=course.give_up,
        )
        return retrying(operation)

    async def call_async(
        self, operation: Callable[[], Awaitable[T]], *, repeats_unknown: bool
    ) -> T:
        """As `call`, for a coroutine function."""
        course = _Course(self, repeats_unknown)
        retrying = tenacity.AsyncRetrying(
            sleep=asyncio.sleep,
            stop=tenacity.stop_before_delay(self.deadline_s),
            wait=course.pause_s,
            retry=tenacity.retry_if_exception(course.may_repeat),
            retry_error_callback=course.give_up,
        )
        return await retrying(operation)


class _Course:
    """The tries of one operation."""

    def __init__(self, policy: RetryPolicy, repeats_unknown: bool) -> None:
        self._policy = policy
        self._repeats_unknown = repeats_unknown
        self._is_unknown = False
        self._random = random.SystemRandom()

    def may_repeat(self, error: BaseException) -> bool:
        if isinstance(error, OutcomeUnknown):
            self._is_unknown = True
            return self._repeats_unknown
        return isinstance(error, Transient)

    def pause_s(self, state: tenacity.RetryCallState) -> float:
        policy = self._policy
        error = None if state.outcome is None else state.outcome.exception()
        throttled = isinstance(error, Throttled)
        first_s = policy.throttled_first_s if throttled else policy.pause_first_s
        longest_s = first_s * 2.0 ** min(state.attempt_number - 1, _EXPONENT_MAX)
        return min(longest_s, policy.pause_max_s) * self._random.uniform(0.5, 1.0)

    def give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        error = None if state.outcome is None else state.outcome.exception()
        if not isinstance(error, StoreError):  # only these are repeated, so only these end here
            raise RuntimeError("gave up without an error: a defect in the retry")  # noqa: TRY004
        kind = OutcomeUnknown if self._is_unknown else type(error)
        spent_s = state.seconds_since_start or 0.0
        raise kind(
            f"{error}; gave up after {state.attempt_number} tries in {spent_s:.1f} s",
            operation=error.operation,
            key=error.key,
            where=error.where,
            errno=error.errno,
        ) from error


class RetryingStore:
    """A store that is asked again, as a policy says.

    Args:
        inner: the store.
        policy: how patient to be with each operation.
        repeats_unknown: the operations that are repeated even if they may have happened. Safe for
            `REPEATABLE` where each key has one writer.
        sleep: waits so many seconds between two tries.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy,
        *,
        repeats_unknown: frozenset[str] = frozenset(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not repeats_unknown <= REPEATABLE:
            raise ValueError(
                f"cannot repeat {', '.join(sorted(repeats_unknown - REPEATABLE))} after an unknown"
                f" outcome; only {', '.join(sorted(REPEATABLE))}"
            )
        self._inner = inner
        self._policy = policy
        self._repeats_unknown = repeats_unknown
        self._sleep = sleep

    @property
    def url(self) -> str:
        """That of the store inside."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store inside; asking may take several tries."""
        return self._do("capabilities", lambda: self._inner.capabilities)

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self._do("put", lambda: self._inner.put(key, data))

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """See `Store.put_stream`. Tried once if `chunks` can be read only once."""
        if isinstance(chunks, Iterator):
            self._inner.put_stream(key, chunks, size_bytes)
        else:
            self._do("put_stream", lambda: self._inner.put_stream(key, chunks, size_bytes))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`. After an unknown outcome it is not tried again."""
        self._do("put_if_absent", lambda: self._inner.put_if_absent(key, data))

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        return self._do("get", lambda: self._inner.get(key, bytes_max))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        return self._do("get_range", lambda: self._inner.get_range(key, offset, length))

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`."""
        self._do("read_into", lambda: self._inner.read_into(key, offset, target))

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        return self._do("stat", lambda: self._inner.stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. After a failure it goes on behind the last key that was given out."""
        check_prefix(prefix, operation="list", where=self.url)
        return self._listing(prefix)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._do("delete", lambda: self._inner.delete(key))

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.leftovers`."""
        check_prefix(prefix, operation="leftovers", where=self.url)

        def lazily() -> Iterator[ObjectInfo]:
            yield from self._do("leftovers", lambda: tuple(self._inner.leftovers(prefix)))

        return lazily()

    def sweep(self, leftover: ObjectInfo) -> None:
        """See `Store.sweep`."""
        self._do("sweep", lambda: self._inner.sweep(leftover))

    def _do(self, operation: str, call: Callable[[], T]) -> T:
        repeats = operation in self._repeats_unknown
        return self._policy.call(call, repeats_unknown=repeats, sleep=self._sleep)

    def _listing(self, prefix: str) -> Iterator[ObjectInfo]:
        source: Iterator[ObjectInfo] | None = None
        last = ""

        def following() -> ObjectInfo | None:
            nonlocal source
            # A generator that raised is spent: unless all went well, the next try begins anew.
            going, source = source or self._inner.list(prefix), None
            found = next((info for info in going if info.key > last), None)
            source = going
            return found

        while (info := self._do("list", following)) is not None:
            last = info.key
            yield info

"""Retries: only of what cannot do harm, apart by growing random pauses, until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.store_suite import StoreSuite

pytest.importorskip("tenacity", reason="tenacity is not installed: pip install 'keepstep[s3]'")

from keepstep.storage.errors import (
    AlreadyExists,
    Denied,
    NoSpace,
    OutcomeUnknown,
    Permanent,
    StoreError,
    Throttled,
    Transient,
)
from keepstep.storage.memory import MemoryStore
from keepstep.storage.retry import REPEATABLE, RetryingStore, RetryPolicy
from keepstep.storage.store import ObjectInfo, Store

QUICK = RetryPolicy(deadline_s=120.0, pause_first_s=1e-4, pause_max_s=1e-3, throttled_first_s=1e-4)


class TestRetryingStore(StoreSuite):
    """A store that fails now and then is, behind retries, a store like any other."""

    def make(self, directory: Path) -> Store:
        self.inner = MemoryStore()
        struck = frozenset({*CALLS} - {"put_stream"})  # which the suite calls with iterators
        faults = [Fault(Action.FAIL, at=at, operations=struck) for at in range(0, 3_000, 3)]
        return RetryingStore(FaultyStore(self.inner, *faults), QUICK)

    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        self.inner._objects[key] = (data, 1e9)

    def get_raw(self, store: Store, key: str) -> bytes | None:
        found = self.inner._objects.get(key)
        return None if found is None else found[0]


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("k", b"new"),
    "put_stream": lambda store: store.put_stream("k", [b"n", b"ew"], 3),
    "put_if_absent": lambda store: store.put_if_absent("fresh", b"new"),
    "get": lambda store: store.get("k", 10),
    "get_range": lambda store: store.get_range("k", 0, 1),
    "read_into": lambda store: store.read_into("k", 0, memoryview(bytearray(1))),
    "stat": lambda store: store.stat("k"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("k"),
    "leftovers": lambda store: list(store.leftovers("")),
    "sweep": lambda store: store.sweep(ObjectInfo("k", 0, 0.0)),
}


def faulty(*faults: Fault) -> FaultyStore:
    inner = MemoryStore()
    inner.put("k", b"old")
    return FaultyStore(inner, *faults)


def tries(store: FaultyStore, name: str) -> int:
    return sum(operation == name for operation, _ in store.calls)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [Transient, Throttled])
def test_what_did_not_happen_is_tried_again(name: str, kind: type[StoreError]) -> None:
    inner = faulty(Fault(Action.FAIL, times=3, operations=frozenset({name}), error=kind))
    CALLS[name](RetryingStore(inner, QUICK))
    assert tries(inner, name) == 4


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [Permanent, Denied, NoSpace])
def test_what_will_fail_again_is_tried_once(name: str, kind: type[StoreError]) -> None:
    inner = faulty(Fault(Action.FAIL, operations=frozenset({name}), error=kind))
    with pytest.raises(kind):
        CALLS[name](RetryingStore(inner, QUICK, repeats_unknown=REPEATABLE))
    assert tries(inner, name) == 1


@pytest.mark.parametrize("name", sorted({*REPEATABLE, "put_if_absent"}))
def test_an_unknown_outcome_is_the_callers_unless_he_gave_it_away(name: str) -> None:
    lost = Fault(Action.LOSE_ANSWER, operations=frozenset({name}))
    inner = faulty(lost)
    with pytest.raises(OutcomeUnknown):
        CALLS[name](RetryingStore(inner, QUICK))
    assert tries(inner, name) == 1
    inner = faulty(lost)
    store = RetryingStore(inner, QUICK, repeats_unknown=REPEATABLE)
    if name == "put_if_absent":
        with pytest.raises(OutcomeUnknown):
            CALLS[name](store)
        return
    CALLS[name](store)
    assert tries(inner, name) == 2


def test_put_if_absent_is_never_repeated_into_its_own_object() -> None:
    inner = faulty(
        Fault(Action.LOSE_ANSWER, operations=frozenset({"put_if_absent"}), error=OutcomeUnknown)
    )
    with pytest.raises(OutcomeUnknown):
        RetryingStore(inner, QUICK, repeats_unknown=REPEATABLE).put_if_absent("fresh", b"new")
    with pytest.raises(AlreadyExists):
        inner.put_if_absent("fresh", b"another")
    with pytest.raises(ValueError, match="cannot repeat put_if_absent"):
        RetryingStore(inner, QUICK, repeats_unknown=frozenset({"put_if_absent"}))


def test_a_stream_that_can_be_read_only_once_is_tried_once() -> None:
    inner = faulty(Fault(Action.FAIL, operations=frozenset({"put_stream"})))
    with pytest.raises(Transient):
        RetryingStore(inner, QUICK).put_stream("k", iter([b"new"]), 3)
    assert inner.get("k", 3) == b"old"


def test_gives_up_at_the_deadline_and_says_so() -> None:
    pauses: list[float] = []
    inner = faulty(Fault(Action.FAIL, times=1_000_000))
    policy = RetryPolicy(deadline_s=0.3, pause_first_s=0.01, pause_max_s=0.05)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    with pytest.raises(Transient, match=r"gave up after \d+ tries in \d+\.\d s") as caught:
        RetryingStore(inner, policy, sleep=sleep).get("k", 10)
    assert caught.value.key == "k"
    assert caught.value.operation == "get"
    assert sum(pauses) <= 0.3
    assert len(inner.calls) == len(pauses) + 1
    for number, pause_s in enumerate(pauses):
        longest_s = min(0.01 * 2**number, 0.05)
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(pauses)) == len(pauses)


def test_what_may_have_happened_stays_unknown_whatever_the_last_try_says() -> None:
    policy = RetryPolicy(deadline_s=0.05, pause_first_s=0.001, pause_max_s=0.01)
    inner = faulty(Fault(Action.LOSE_ANSWER), Fault(Action.FAIL, at=1, times=1_000_000))
    with pytest.raises(OutcomeUnknown, match="gave up"):
        RetryingStore(inner, policy, repeats_unknown=REPEATABLE).put("k", b"new")


def test_a_store_that_asks_for_less_is_left_alone_for_longer() -> None:
    pauses: list[float] = []
    inner = faulty(Fault(Action.FAIL, error=Throttled, times=2))
    RetryingStore(inner, RetryPolicy(), sleep=pauses.append).get("k", 10)
    assert 0.25 <= pauses[0] <= 0.5 <= pauses[1] <= 1.0


def test_a_listing_goes_on_behind_the_last_key() -> None:
    class Breaks(MemoryStore):
        breaks = 5

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            for number, info in enumerate(super().list(prefix)):
                if number == 3 + self.breaks and self.breaks:
                    self.breaks -= 1
                    raise Transient("broken off")
                yield info

    inner = Breaks()
    keys = [f"k{number:02}" for number in range(20)]
    for key in keys:
        inner.put(key, b"")
    assert [info.key for info in RetryingStore(inner, QUICK).list("")] == keys
    assert inner.breaks == 0


def test_coroutines_are_retried_alike() -> None:
    failures = [Transient("one"), OutcomeUnknown("two")]

    async def work() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    assert asyncio.run(QUICK.call_async(work, repeats_unknown=True)) == "done"
    failures.extend([Transient("one"), OutcomeUnknown("two")])
    with pytest.raises(OutcomeUnknown, match="two"):
        asyncio.run(QUICK.call_async(work, repeats_unknown=False))

"""The faulty store strikes the call it was told to, as it was told to."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore

from keepstep.storage.errors import NoSpace, NotFound, OutcomeUnknown, Transient
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store


def test_without_faults_it_passes_everything_on() -> None:
    store = FaultyStore(MemoryStore())
    assert isinstance(store, Store)
    store.put("a", b"x")
    store.put_if_absent("b", b"y")
    store.put_stream("c", [b"z"], 1)
    target = bytearray(1)
    store.read_into("a", 0, memoryview(target))
    assert (store.get("b", 1), store.get_range("c", 0, 1), bytes(target)) == (b"y", b"z", b"x")
    store.delete("a")
    assert [info.key for info in store.list("")] == ["b", "c"]
    assert [name for name, _ in store.calls] == [
        "put", "put_if_absent", "put_stream", "read_into", "get", "get_range", "delete", "list"
    ]  # fmt: skip


def test_fail_does_nothing_and_then_all_is_well() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.FAIL, at=1, times=2, operations=WRITES))
    store.put("a", b"1")
    for _ in range(2):
        with pytest.raises(Transient):
            store.put("a", b"2")
        assert store.get("a", 1) == b"1"
    store.put("a", b"3")
    assert store.get("a", 1) == b"3"


def test_fail_takes_the_error_and_number_it_is_given() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.FAIL, error=NoSpace, errno=28))
    with pytest.raises(NoSpace) as caught:
        store.put("a", b"1")
    assert caught.value.errno == 28


def test_a_lost_answer_did_happen() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.LOSE_ANSWER, key_prefix="log/"))
    store.put("a", b"1")
    with pytest.raises(OutcomeUnknown):
        store.put_if_absent("log/0", b"2")
    assert store.get("log/0", 1) == b"2"


@pytest.mark.parametrize(
    ("action", "there"),
    [(Action.CRASH_BEFORE, None), (Action.CRASH_AFTER, b"1234"), (Action.TEAR, b"12")],
)
def test_a_crash_ends_all(action: Action, there: bytes | None) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, Fault(action, at=0))
    with pytest.raises(Crashed):
        store.put("a", b"1234")
    with pytest.raises(Crashed):
        store.get("a", 10)
    if there is None:
        with pytest.raises(NotFound):
            inner.get("a", 10)
    else:
        assert inner.get("a", 10) == there


def test_a_call_that_fails_by_itself_can_be_struck_too() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.CRASH_AFTER))
    with pytest.raises(Crashed):
        store.get("nothing", 1)


def test_what_is_slow_happens_later() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.SLOW, seconds=0.05))
    begun_s = time.monotonic()
    store.put("a", b"1")
    assert time.monotonic() - begun_s >= 0.05
    assert store.get("a", 1) == b"1"


def test_what_hangs_ends_when_it_is_released_and_has_not_happened() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.HANG, operations=WRITES))
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(store.put, "a", b"1")
        with pytest.raises(TimeoutError):
            hanging.result(0.05)
        store.release()
        with pytest.raises(OutcomeUnknown):
            hanging.result(120)
    with pytest.raises(NotFound):
        store.get("a", 1)


def test_what_lands_late_is_what_was_put_then() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.LAND_LATE, times=2, operations=WRITES))
    data = bytearray(b"first")
    with pytest.raises(OutcomeUnknown):
        store.put("a", data)
    with pytest.raises(OutcomeUnknown):
        store.put_if_absent("b", b"late")
    data[:] = b"other"
    store.put("a", b"new")
    store.put("b", b"taken")
    store.land()
    assert (store.get("a", 9), store.get("b", 9)) == (b"first", b"taken")


@pytest.mark.parametrize(("action", "there"), [(Action.SHORT, b"12"), (Action.DAMAGE, b"1224")])
def test_a_bad_store_says_that_all_is_well(action: Action, there: bytes) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, Fault(action, operations=WRITES))
    store.put("a", b"1234")
    assert inner.get("a", 9) == there
    inner.put("b", b"1234")
    store = FaultyStore(inner, Fault(action, times=3))
    target = bytearray(b"....")
    store.read_into("b", 0, memoryview(target))
    assert target == there.ljust(4, b"\0")
    assert store.get("b", 9) == store.get_range("b", 0, 4) == there
    assert store.get("b", 9) == b"1234"

"""The faulty store strikes the call it was told to, as it was told to."""

from __future__ import annotations

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

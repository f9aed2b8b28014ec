from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.keepers import eventually

from keepstep.ckpt.host_hints import HostHint, HostHints, publish_hint, read_hint, read_hints
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

HINT = HostHint("h0", "127.0.0.1:1234", "2026-11-30T18:00:00+00:00", 3)


@contextmanager
def hints_on(store: Store, tell: Callable[[str], None]) -> Iterator[HostHints]:
    hints = HostHints(store, tell)
    try:
        yield hints
    finally:
        hints.close(20.0)
        assert not hints._thread.is_alive()


def test_a_hint_is_read_as_it_was_published() -> None:
    store = MemoryStore()
    assert read_hint(store, "h0") is None
    publish_hint(store, HINT)
    assert read_hint(store, "h0") == HINT
    assert read_hints(store) == {"h0": HINT}


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"x" * 10_000, b"\xff"])
def test_what_is_no_hint_is_none(data: bytes) -> None:
    store = MemoryStore()
    store.put("hosts/h0.json", data)
    store.put("hosts/readme", b"somebody else's")
    assert read_hint(store, "h0") is None
    assert read_hints(store) == {}


def test_a_hint_under_another_hosts_name_is_none() -> None:
    store = MemoryStore()
    publish_hint(store, HINT)
    store.put("hosts/h1.json", store.get("hosts/h0.json", 4_096))
    assert read_hint(store, "h1") is None


def test_a_thread_publishes_and_finds() -> None:
    store, told = MemoryStore(), list[str]()
    with hints_on(store, told.append) as hints:
        assert hints.locate("h0") is None
        hints.publish(HINT)
        eventually(lambda: hints.locate("h0") == HINT.address, "it is found")
    assert told == []


def test_a_store_that_fails_is_told_once_and_tried_again() -> None:
    store = FaultyStore(MemoryStore(), Fault(Action.FAIL, times=3, operations=frozenset({"put"})))
    told: list[str] = []
    with hints_on(store, told.append) as hints:
        hints.publish(HINT)
        eventually(lambda: read_hint(store, "h0") == HINT, "it is published")
    assert len(told) == 1
    assert "injected" in told[0]

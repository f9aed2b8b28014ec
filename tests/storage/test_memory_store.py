"""The memory store behaves as a store."""

from __future__ import annotations

from pathlib import Path

from tests.kit.store_suite import StoreSuite

from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store


class TestMemoryStore(StoreSuite):
    def make(self, directory: Path) -> Store:
        return MemoryStore()

    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._objects[key] = (data, 1e9)

    def get_raw(self, store: Store, key: str) -> bytes | None:
        assert isinstance(store, MemoryStore)
        found = store._objects.get(key)
        return None if found is None else found[0]

    def test_says_that_it_does_not_last(self, store: Store) -> None:
        assert store.capabilities.put_if_absent
        assert not store.capabilities.durable

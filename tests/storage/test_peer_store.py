from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.peers import serving
from tests.kit.store_suite import StoreSuite

from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store


class TestPeerOfFileStore(StoreSuite):
    turns = 20

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        self.root = tmp_path
        with serving(FileStore(tmp_path)) as store:
            yield store

    def make(self, directory: Path) -> Store:
        raise NotImplementedError

    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, store: Store, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None


class TestPeerOfMemoryStore(StoreSuite):
    turns = 20

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        self.inner = MemoryStore()
        with serving(self.inner) as store:
            yield store

    def make(self, directory: Path) -> Store:
        raise NotImplementedError

    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def get_raw(self, store: Store, key: str) -> bytes | None:
        return self.inner._objects.get(key, (None, 0.0))[0]

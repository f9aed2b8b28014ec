"""A host's drains with real stores, and what tests ask of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.shelved import JOB, READ_BYTES_MAX, Ear, Host, begin_generation

from keepstep.ckpt.drains import Drains
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import State
from keepstep.ckpt.shelf import Shelved
from keepstep.storage.errors import NotFound
from keepstep.storage.file import FileStore
from keepstep.storage.store import Store

PATIENCE_S = 0.4
CLOSE_S = 10.0


class Bench:
    """A host with a disk and a store, and its drains, in term 1, generation 1."""

    def __init__(self, directory: Path) -> None:
        for name in ("store", "disk"):
            (directory / name).mkdir()
        self.store = FileStore(directory / "store")
        self.disk = FileStore(directory / "disk")
        self.ear = Ear()
        self.host = Host()
        self.shelf = self.host.shelf
        self._open: list[Drains] = []
        begin_generation(self.store)

    def drains(
        self,
        store: Store | None = None,
        disk: Store | None = None,
        has_disk: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> Drains:
        at, on = store or self.store, disk or self.disk
        made = Drains(
            lambda: at,
            (lambda: on) if has_disk else None,
            self.shelf,
            self.ear,
            job=JOB,
            patience_s=patience_s,
        )
        self._open.append(made)
        return made

    def close(self) -> None:
        for each in self._open:
            each.close(0.0)


@contextmanager
def opened(directory: Path) -> Iterator[Bench]:
    """A bench; at the end no thread of its drains is left."""
    made = Bench(directory)
    yield made
    made.close()
    names = {thread.name for thread in threading.enumerate()}
    deadline_s = time.monotonic() + 60
    while any(name.startswith("keepstep-") for name in names) and time.monotonic() < deadline_s:
        time.sleep(0.01)
        names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith("keepstep-")]


def at(step: int, generation: int = 1) -> State:
    return State(generation, step)


def is_there(store: Store, key: str) -> bool:
    try:
        store.stat(key)
    except NotFound:
        return False
    return True


def same(store: Store, shelved: Shelved) -> bool:
    return store.get(image_key(shelved.state, shelved.rank), READ_BYTES_MAX) == bytes(shelved.view)


def steps_on(store: Store) -> set[int]:
    return {int(info.key.split("/s")[1][:12]) for info in store.list("states/")}

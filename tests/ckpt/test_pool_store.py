"""A pool as a store: sealed images only, by their keys, never parts of two in one answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_store import PoolStore
from keepstep.ckpt.process import this_process
from keepstep.ckpt.tiers import Due
from keepstep.storage.errors import BadKey, NotFound, Permanent, TooLarge, Truncated
from keepstep.storage.store import ObjectInfo, Store

SIZE = 5000


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool") as pool:
        for _ in range(4):
            pool.add_slot(8192)
        yield pool


@pytest.fixture
def store(pool: Pool) -> PoolStore:
    return PoolStore(pool)


def image(step: int) -> bytes:
    return bytes((step + place) % 251 for place in range(SIZE))


def seal(pool: Pool, index: int, rank: int, step: int, generation: int = 1) -> str:
    slot = pool.slots[index]
    state = State(generation, step)
    slot.claim(this_process(), rank, state, Due.NOWHERE, is_own=rank < 2)
    slot.image[:SIZE] = image(step)
    slot.captured(b"{}", SIZE)
    slot.sealed()
    return image_key(state, rank)


def test_it_is_a_store(store: PoolStore, pool: Pool) -> None:
    assert isinstance(store, Store)
    assert store.url == f"pool://{pool.path}"
    assert not store.capabilities.durable


def test_sealed_images_are_read_by_their_keys(store: PoolStore, pool: Pool) -> None:
    key = seal(pool, 2, rank=5, step=7)
    seal(pool, 0, rank=1, step=7)
    assert store.get(key, SIZE) == image(7)
    assert store.get_range(key, 10, 30) == image(7)[10:40]
    target = bytearray(100)
    store.read_into(key, SIZE - 100, memoryview(target))
    assert bytes(target) == image(7)[-100:]
    assert store.stat(key) == ObjectInfo(key, SIZE, 0.0)


def test_a_view_is_in_place_and_read_only(store: PoolStore, pool: Pool) -> None:
    key = seal(pool, 2, rank=5, step=7)
    view = store.view(key)
    assert (len(view), view.readonly) == (SIZE, True)
    pool.slots[2].image[3] = 9
    assert view[3] == 9


def test_images_are_listed_by_key(store: PoolStore, pool: Pool) -> None:
    keys = [seal(pool, 3, 0, 9), seal(pool, 0, 5, 8), seal(pool, 1, 0, 8)]
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("states/g000001/s000000000008/")] == [
        keys[2],
        keys[1],
    ]
    assert list(store.list("log/")) == []
    assert list(store.leftovers("")) == []


def test_what_is_not_sealed_is_not_there(store: PoolStore, pool: Pool) -> None:
    slot = pool.slots[0]
    slot.claim(this_process(), 0, State(1, 1), Due.NOWHERE)
    key = image_key(State(1, 1), 0)
    for step in range(2):
        if step:
            slot.captured(b"", SIZE)
        assert list(store.list("")) == []
        with pytest.raises(NotFound, match="no such image is sealed there"):
            store.stat(key)
    slot.sealed()
    assert store.stat(key).size_bytes == SIZE
    slot.free()
    with pytest.raises(NotFound):
        store.view(key)


@pytest.mark.parametrize("key", [manifest_key(State(1, 7)), "log/000000/000000001", "other"])
def test_keys_that_are_no_images_are_not_there(store: PoolStore, pool: Pool, key: str) -> None:
    seal(pool, 0, 0, 7)
    with pytest.raises(NotFound):
        store.get(key, 10)


def test_bounds_and_bad_keys_are_refused_as_by_any_store(store: PoolStore, pool: Pool) -> None:
    key = seal(pool, 0, 0, 7)
    with pytest.raises(TooLarge, match="5000 bytes, expected at most 4999"):
        store.get(key, SIZE - 1)
    with pytest.raises(Truncated, match="the object has 5000"):
        store.get_range(key, SIZE - 1, 2)
    with pytest.raises(Truncated):
        store.read_into(key, 1, memoryview(bytearray(SIZE)))
    with pytest.raises(ValueError, match="negative"):
        store.get_range(key, -1, 2)
    with pytest.raises(ValueError, match="read-only"):
        store.read_into(key, 0, memoryview(b"abc"))
    with pytest.raises(BadKey):
        store.stat("../pool")


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put("a", b""),
        lambda store: store.put_stream("a", [b""], 0),
        lambda store: store.put_if_absent("a", b""),
        lambda store: store.delete("a"),
        lambda store: store.sweep(ObjectInfo("a", 0, 0.0)),
    ],
)
def test_nothing_can_be_written(store: PoolStore, call: Callable[[PoolStore], None]) -> None:
    with pytest.raises(Permanent, match="can only be read"):
        call(store)


def test_a_damaged_row_hides_its_image_and_no_other(store: PoolStore, pool: Pool) -> None:
    seal(pool, 0, 0, 7)
    key = seal(pool, 1, 1, 7)
    pool.slots[0]._row[2] ^= 1
    assert [info.key for info in store.list("")] == [key]


def test_an_image_that_is_overwritten_while_it_is_read_is_not_there(
    store: PoolStore, pool: Pool
) -> None:
    """A rank goes through its states; a reader gets whole ones, or is told that they are gone."""
    is_over = threading.Event()

    def run() -> None:
        step = 0
        while not is_over.is_set():
            step += 1
            seal(pool, 0, 0, step)

    writer = threading.Thread(target=run)
    writer.start()
    whole = gone = 0
    target = bytearray(SIZE)
    try:
        end_s = time.monotonic() + 60
        while (whole < 200 or gone < 5) and time.monotonic() < end_s:
            for info in store.list(""):
                step = int(info.key.split("/s")[1][:12])
                try:
                    store.read_into(info.key, 0, memoryview(target))
                except NotFound:
                    gone += 1
                else:
                    whole += 1
                    assert target == image(step)
    finally:
        is_over.set()
        writer.join(30)
    assert (whole >= 200, gone >= 5) == (True, True)

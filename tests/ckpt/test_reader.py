"""Reading regions of a checkpoint: any box, bounded pieces, and no byte that was not checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.make_store import Content, arange, cut, make_store, mesh, split

from keepstep.ckpt.address import find_live
from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.ckpt.region import Box, whole
from keepstep.ckpt.slabs import slabs
from keepstep.storage.errors import NotFound
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

STATE = State(1, 1)
GRID = mesh(pp=1, dp_replicate=1, dp_shard=3, tp=2)


def opened(store: Store) -> CheckpointReader:
    return open_checkpoint(store, find_live(Log(store).read(), None, store.url))


def stored(content: Content) -> MemoryStore:
    store = MemoryStore()
    make_store(store, content)
    return store


def spoil(store: Store, key: str, offset: int) -> None:
    """Flip one bit of a file."""
    raw = bytearray(store.get(key, 1 << 30))
    raw[offset] ^= 1
    store.put(key, bytes(raw))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    ]
    return Box(tuple(offsets), tuple(sizes))


CUBE = arange((13, 7, 5), "BF16")
CUBE_STORE = stored(
    Content({"t": CUBE}, GRID, {"t": split("tp:1", "dp_shard:1")}, aliases={"other": "t"})
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(boxes(CUBE.shape))
def test_any_box_reads_as_the_array_itself(box: Box) -> None:
    reader = opened(CUBE_STORE)
    for name in ("t", "other"):
        assert reader.read(name, box).tobytes() == cut(CUBE, box).tobytes()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 300), st.data())
def test_slabs_are_the_box_in_row_major_order_within_the_bound(
    sizes: list[int], bytes_max: int, data: st.DataObject
) -> None:
    shape = tuple(sizes)
    within = whole(shape)
    box = within if 0 in shape else data.draw(boxes(shape))
    numbered = np.arange(within.volume).reshape(shape)
    seen = []
    for part in slabs(box, 4, bytes_max, within):
        numbers = cut(numbered, part).reshape(-1)
        assert (numbers[-1] - numbers[0]) * 4 < max(bytes_max, 4)
        seen += list(numbers)
    assert seen == list(cut(numbered, box).reshape(-1))


def test_small_tensors_that_share_chunks_with_large_ones_read_right_in_any_order() -> None:
    tensors = {}
    for number in range(8):
        tensors[f"large/{number}"] = arange((CHUNK_BYTES // 4 * 3 // 2 + number,)) + number
        tensors[f"small/{number}"] = arange((300,)) + number
    reader = opened(stored(Content(tensors, mesh(dp=1))))
    for name in [*sorted(tensors), *sorted(tensors, reverse=True), *tensors]:
        assert reader.read(name).tobytes() == tensors[name].tobytes(), name


def test_a_flipped_byte_of_data_is_found_and_named() -> None:
    tensors = {"a": arange((CHUNK_BYTES,), "U8"), "b": arange((100,), "U8")}
    store = stored(Content(tensors, mesh(dp=1)))
    size_bytes = store.stat(image_key(STATE, 0)).size_bytes
    spoil(store, image_key(STATE, 0), size_bytes - 1)
    reader = opened(store)
    assert reader.read("a").tobytes() == tensors["a"].tobytes()
    with pytest.raises(Corrupt) as caught:
        reader.read("b")
    assert caught.value.file == image_key(STATE, 0)
    assert caught.value.tensor == "b"
    assert caught.value.offset == size_bytes - 100


def test_every_flipped_byte_of_a_header_is_found() -> None:
    store = stored(Content({"a": arange((3,))}, mesh(dp=1)))
    key = image_key(STATE, 0)
    length = store.stat(key).size_bytes - 12
    for offset in range(0, length, 7):
        spoil(store, key, offset)
        with pytest.raises(FormatError) as caught:
            opened(store).read("a")
        assert caught.value.file == key
        spoil(store, key, offset)
    assert opened(store).read("a").tobytes() == arange((3,)).tobytes()


def test_a_manifest_that_is_not_the_committed_one_is_refused() -> None:
    store = stored(Content({"a": arange((3,))}, mesh(dp=1), values={"step": 1}))
    key = manifest_key(STATE)
    data = store.get(key, 1 << 20)
    store.put(key, data.replace(b'"step":1', b'"step":2'))
    with pytest.raises(Corrupt, match="as committed") as caught:
        opened(store)
    assert caught.value.file == key


def test_an_image_cut_short_exchanged_or_gone_is_named() -> None:
    grid, cuts = mesh(dp=2), {"a": split("dp:0")}
    store = stored(Content({"a": arange((8,))}, grid, cuts))
    zero, one = (store.get(image_key(STATE, rank), 1 << 20) for rank in (0, 1))
    for wrong in (one[:-1], one + b"\0", zero):
        store.put(image_key(STATE, 1), wrong)
        with pytest.raises(FormatError) as caught:
            opened(store).read("a")
        assert caught.value.file == image_key(STATE, 1)
    store.delete(image_key(STATE, 1))
    with pytest.raises(NotFound):
        opened(store).read("a")
    assert opened(store).read("a", Box((0,), (4,))).tobytes() == arange((4,)).tobytes()


def test_unknown_names_are_key_errors() -> None:
    reader = opened(CUBE_STORE)
    for ask in (reader.spec, reader.read):
        with pytest.raises(KeyError):
            ask("nothing")


def test_an_image_that_is_whole_but_of_other_data_is_refused() -> None:
    store = stored(Content({"a": arange((3,))}, mesh(dp=1)))
    other = stored(Content({"a": arange((3,)) + 1}, mesh(dp=1)))
    store.put(image_key(STATE, 0), other.get(image_key(STATE, 0), 1 << 20))
    with pytest.raises(Corrupt, match="digest"):
        opened(store).read("a")

"""The plan of a restore: whole chunks, each once, neighbours joined, far gaps left out."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import pytest

from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_count
from keepstep.ckpt.errors import FormatError, NotRestorable
from keepstep.ckpt.image import ImageHeader, build
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import State, TensorSpec
from keepstep.ckpt.mosaic import size_of
from keepstep.ckpt.placement import Mesh, MeshAxis, Placement, Split
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box, whole
from keepstep.ckpt.restore import ReadPlan, Source, find_sources, plan_reads

ONE = Mesh((MeshAxis(name="dp_shard", size=1),))
DIGEST = "0" * 32


def _header(items: dict[str, tuple[str, tuple[int, ...], Box]]) -> ImageHeader:
    return build("job", State(1, 1), 0, ONE, DIGEST, items)


def _whole_items(shapes: Mapping[str, tuple[int, ...]]) -> ImageHeader:
    return _header({name: ("F32", shape, whole(shape)) for name, shape in shapes.items()})


def _tensors(header: ImageHeader) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(shape=item.shape, dtype=item.dtype.name, placement=0)
        for name, item in header.items.items()
    }


def _plan(header: ImageHeader, boxes: dict[str, Box]) -> ReadPlan:
    sources = [Source(name, name, header.items[name].box, box) for name, box in boxes.items()]
    return plan_reads({0: sources}, {0: header}, _tensors(header))


def test_all_of_an_image_is_one_read() -> None:
    shapes = {f"t{number}": (number + 1, 100_003) for number in range(9)}
    header = _whole_items(shapes)
    plan = _plan(header, {name: whole(shape) for name, shape in shapes.items()})
    assert plan.chunks == {0: ((0, chunk_count(header.data_bytes)),)}


def test_neighbours_that_only_touch_are_one_read() -> None:
    quarter = CHUNK_BYTES // 4
    header = _whole_items({"a": (quarter,), "b": (quarter,), "c": (quarter,)})
    plan = _plan(header, {"b": whole((quarter,)), "c": whole((quarter,))})
    assert plan.chunks == {0: ((1, 3),)}


def test_neighbours_in_one_chunk_read_it_once() -> None:
    large = {"a": (20_000,), "b": (20_000,), "far": (2_000_000,), "z": (20_000,)}
    header = _whole_items(large)
    plan = _plan(header, {"a": Box((3,), (2,)), "b": Box((0,), (10,)), "z": Box((9,), (1,))})
    assert plan.chunks == {0: ((0, 1), (7, 8))}


def test_small_tensors_lie_together_so_that_all_of_them_are_one_chunk() -> None:
    names = [f"layer{number}" for number in range(9)]
    shapes = {f"{name}/weight": (300_000,) for name in names}
    header = _whole_items(shapes | {f"{name}/step": () for name in names})
    plan = _plan(header, {f"{name}/step": whole(()) for name in names})
    last = chunk_count(header.data_bytes)
    assert plan.chunks == {0: ((last - 1, last),)}


def test_columns_of_a_matrix_with_huge_rows_do_not_read_the_gaps() -> None:
    columns = 4 * CHUNK_BYTES
    header = _whole_items({"m": (3, columns)})  # rows of 16 chunks
    plan = _plan(header, {"m": Box((0, 5), (3, 10))})
    assert plan.chunks == {0: ((0, 1), (16, 17), (32, 33))}


def test_columns_of_a_matrix_with_short_rows_are_one_read() -> None:
    header = _whole_items({"m": (3_000, 1_000)})
    plan = _plan(header, {"m": Box((1_000, 0), (500, 3))})
    ((first, last),) = plan.chunks[0]
    assert last - first == 3


def test_an_image_that_lacks_what_the_plan_promises_is_refused() -> None:
    header = _whole_items({"a": (10,)})
    source = Source("a", "a", Box((0,), (5,)), Box((0,), (5,)))
    with pytest.raises(FormatError, match="'a'") as caught:
        plan_reads({0: [source]}, {0: header}, _tensors(header))
    assert caught.value.file == image_key(State(1, 1), 0)
    other = {"a": TensorSpec(shape=(10,), dtype="I32", placement=0)}
    with pytest.raises(FormatError, match=r"expected I32 .* found F32"):
        plan_reads({0: [Source("a", "a", whole((10,)), whole((10,)))]}, {0: header}, other)


class _Holey(Plan):
    def owners(self, region: object) -> list[tuple[int, Box]]:
        return [(0, Box((0,), (4,)))]


def test_images_that_do_not_cover_what_is_needed_are_refused() -> None:
    tensors = {"a": TensorSpec(shape=(10,), dtype="F32", placement=0)}
    with pytest.raises(NotRestorable, match=r"4 of the 10 elements of 'a'"):
        find_sources(_Holey(ONE, [Placement()], tensors), {"a": whole((10,))}, {"a": "a"})


@pytest.mark.parametrize("seed", range(60))
def test_the_pieces_of_the_needed_chunks_are_the_needed_elements(seed: int) -> None:
    """Random boxes of random tensors, with random bytes: carried out, and looked at by numpy."""
    choose = np.random.default_rng(seed)
    items: dict[str, tuple[str, tuple[int, ...], Box]] = {}
    boxes: dict[str, Box] = {}
    for number in range(6):
        dims = choose.choice([1, 2, 3, 170, 1_300], choose.integers(0, 4))
        shape = tuple(int(size) for size in dims)
        if prod(shape) > 3_000_000:
            shape = shape[:-1]
        items[f"t{number}"] = (str(choose.choice(["U8", "F32", "F64"])), shape, whole(shape))
        offsets = tuple(int(choose.integers(size)) for size in shape)
        sizes = tuple(
            1 + int(choose.integers(size - offset))
            for size, offset in zip(shape, offsets, strict=True)
        )
        boxes[f"t{number}"] = Box(offsets, sizes)
    header = _header(items)
    plan = _plan(header, boxes)
    data = choose.integers(0, 256, header.data_bytes, dtype=np.uint8)
    image = np.full(header.data_bytes, 77, dtype=np.uint8)
    before = -1
    for first, last in plan.chunks[0]:
        assert before < first < last <= chunk_count(header.data_bytes)
        before = last
        brought = slice(first * CHUNK_BYTES, last * CHUNK_BYTES)
        image[brought] = data[brought]
    assert [piece.name for piece in plan.pieces] == list(boxes)
    for piece in plan.pieces:
        item = header.items[piece.name]
        kind = np.dtype(f"V{item.dtype.itemsize}")
        stored = data[item.offset :][: item.size_bytes].view(kind).reshape(item.shape)
        strides = tuple(stride * item.dtype.itemsize for stride in piece.strides)
        found = np.ndarray(piece.box.sizes, kind, image.data, piece.offset, strides)
        place = tuple(
            slice(offset, offset + size)
            for offset, size in zip(piece.box.offsets, piece.box.sizes, strict=True)
        )
        assert found.tobytes() == stored[place].tobytes()


def test_a_restore_of_another_layout_reads_each_byte_of_the_store_once_in_total() -> None:
    """Four ranks with quarters, from two images with halves: no image is read twice over."""
    two = Mesh((MeshAxis(name="dp_shard", size=2),))
    placement = Placement(splits=(Split("dp_shard", 0),))
    shape = (4 * CHUNK_BYTES,)
    tensors = {"a": TensorSpec(shape=shape, dtype="F32", placement=0)}
    plan = Plan(two, [placement], tensors)
    headers = {
        rank: build(
            "job", State(1, 1), rank, two, DIGEST, {"a": ("F32", shape, plan.owned(rank)["a"])}
        )
        for rank in (0, 1)
    }
    total = 0
    for quarter in range(4):
        need = Box((quarter * CHUNK_BYTES,), (CHUNK_BYTES,))
        sources = find_sources(plan, {"a": need}, {"a": "a"})
        assert list(sources) == [quarter // 2]
        for image, ranges in plan_reads(sources, headers, tensors).chunks.items():
            total += size_of(ranges, headers[image].data_bytes)
    assert total == 16 * CHUNK_BYTES

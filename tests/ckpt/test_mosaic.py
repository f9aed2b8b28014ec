"""Resharding as bytes: from any layout to any other and back, by copying runs between buffers.

Two implementations: ours (plan, owners, intersections, runs) and a naive one (numpy arrays cut
up). The elements are numbered, so that one element in a wrong place shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.structures import Drawn, meshes, placements, shapes

from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.manifest import TensorSpec
from keepstep.ckpt.placement import (
    Mesh,
    MeshAxis,
    Pin,
    Placement,
    Split,
    coordinates,
    local_box,
    mesh_size,
)
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box, Region, covers, intersect, runs

Held = list[dict[str, bytearray]]
"""Per rank, the bytes of its local box of each tensor that it holds."""


@dataclass(frozen=True)
class Layouts:
    """The same tensors in two layouts."""

    a: Drawn
    b: Drawn


@st.composite
def layouts(draw: st.DrawFn) -> Layouts:
    """Up to four tensors; about every third is long enough to be split between its holders."""
    names = [f"t{i}" for i in range(draw(st.integers(1, 4)))]
    lengths = shapes(16) | st.tuples(st.integers(100, 400), st.integers(1, 90))
    kinds = {name: (draw(lengths), draw(st.sampled_from(sorted(DTYPES)))) for name in names}
    both = []
    for _ in range(2):
        mesh = draw(meshes())
        tensors, used = {}, []
        for name, (shape, dtype) in kinds.items():
            used.append(draw(placements(mesh, len(shape))))
            tensors[name] = TensorSpec(shape, dtype, len(used) - 1)
        both.append(Drawn(mesh, tuple(used), tensors))
    return Layouts(*both)


def _numbered(spec: TensorSpec) -> npt.NDArray[np.uint8]:
    """An array of `shape` + (itemsize,) whose elements are all different (as far as bytes go)."""
    itemsize = DTYPES[spec.dtype].itemsize
    count = int(np.prod(spec.shape))
    words = np.arange(1, count + 1, dtype="<u8").view(np.uint8).reshape(count, 8)
    wide = np.concatenate([words, words[:, ::-1]], axis=1)[:, :itemsize]
    return np.ascontiguousarray(wide).reshape(*spec.shape, itemsize)


def _naive_held(drawn: Drawn) -> Held:
    """What each rank holds, by cutting arrays: knows nothing of boxes, plans and runs."""
    sizes = {axis.name: axis.size for axis in drawn.mesh.axes}
    held: Held = []
    for rank in range(mesh_size(drawn.mesh)):
        at = dict(zip(sizes, coordinates(drawn.mesh, rank), strict=True))
        mine = {}
        for name, spec in drawn.tensors.items():
            placement = drawn.placements[spec.placement]
            if not all(at[pin.axis] in pin.coords for pin in placement.at):
                continue
            array = _numbered(spec)
            for split in placement.splits:
                step = -(-array.shape[split.dim] // sizes[split.axis])
                low = at[split.axis] * step
                array = array.swapaxes(0, split.dim)[low : low + step].swapaxes(0, split.dim)
            mine[name] = bytearray(array.tobytes())
        held.append(mine)
    return held


def _saved(drawn: Drawn, held: Held) -> list[dict[str, tuple[Box, bytearray]]]:
    """What each rank writes: its owned boxes, copied out of what it holds."""
    plan = Plan(drawn.mesh, drawn.placements, drawn.tensors)
    images = []
    for rank, mine in enumerate(held):
        image = {}
        for name, box in plan.owned(rank).items():
            spec = drawn.tensors[name]
            itemsize = DTYPES[spec.dtype].itemsize
            within = local_box(spec.shape, drawn.placements[spec.placement], drawn.mesh, rank)
            assert within is not None
            data = bytearray(box.volume * itemsize)
            for source, target, length in runs(box, within, itemsize):
                data[target : target + length] = mine[name][source : source + length]
            image[name] = (box, data)
        images.append(image)
    return images


def _restored(source: Drawn, images: list[dict[str, tuple[Box, bytearray]]], target: Drawn) -> Held:
    """What each rank of layout `target` needs, put together from images of layout `source`."""
    plan = Plan(source.mesh, source.placements, source.tensors)
    held: Held = []
    for rank in range(mesh_size(target.mesh)):
        mine = {}
        for name, spec in target.tensors.items():
            placement = target.placements[spec.placement]
            need = local_box(spec.shape, placement, target.mesh, rank)
            if need is None:
                continue
            itemsize = DTYPES[spec.dtype].itemsize
            mine[name] = bytearray(need.volume * itemsize)
            found = plan.owners(Region(name, need))
            assert covers([box for _, box in found], need)
            for owner, box in found:
                owned_box, data = images[owner][name]
                assert owned_box == box
                _copy(box, data, need, mine[name], itemsize)
        held.append(mine)
    return held


def _copy(
    source: Box, source_bytes: bytearray, target: Box, target_bytes: bytearray, itemsize: int
) -> None:
    common = intersect(source, target)
    if common is None:
        return
    packed = bytearray(common.volume * itemsize)
    for start, inner, length in runs(common, source, itemsize):
        packed[inner : inner + length] = source_bytes[start : start + length]
    for start, inner, length in runs(common, target, itemsize):
        target_bytes[start : start + length] = packed[inner : inner + length]


@settings(max_examples=80)
@given(layouts())
def test_any_layout_becomes_any_other_and_comes_back_bit_for_bit(drawn: Layouts) -> None:
    in_a, in_b = _naive_held(drawn.a), _naive_held(drawn.b)
    moved = _restored(drawn.a, _saved(drawn.a, in_a), drawn.b)
    assert moved == in_b
    assert _restored(drawn.b, _saved(drawn.b, moved), drawn.a) == in_a


@pytest.mark.parametrize("rows", [7, 13])
@pytest.mark.parametrize("order", [("tp", "dp"), ("dp", "tp")])
def test_the_uneven_strided_rows_that_torch_gets_wrong(rows: int, order: tuple[str, str]) -> None:
    mesh = Mesh((MeshAxis("dp", 3), MeshAxis("tp", 2)))
    strided = Placement(tuple(Split(axis, 0) for axis in order))
    tensors = {"w": TensorSpec((rows, 3), "F32", 0)}
    source = Drawn(mesh, (strided,), tensors)
    one = Drawn(Mesh((MeshAxis("pp", 1),)), (Placement((), (Pin("pp", (0,)),)),), tensors)
    images = _saved(source, _naive_held(source))
    assert _restored(source, images, one) == _naive_held(one)
    assert _restored(one, _saved(one, _naive_held(one)), source) == _naive_held(source)

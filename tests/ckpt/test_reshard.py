"""Resharding: any state, any placements, any layouts; A -> B -> A gives the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.ckpt.address import find_live
from keepstep.ckpt.arrays import Array
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.layout import BadLayout, Layout, mesh_of, parse_layout
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, Pin, Placement, Split
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.ckpt.relayout import relayout
from keepstep.ckpt.reshard import Resharded, reshard
from keepstep.ckpt.verify import verify
from keepstep.ckpt.writer import TargetTaken
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store
from tests.kit.make_store import (
    TINY,
    Content,
    arange,
    begin,
    llama_state,
    make_store,
    mesh,
    split,
)

ODD_ROWS = (7, 13)


def opened(store: Store, step: int | None = None) -> CheckpointReader:
    return open_checkpoint(store, find_live(Log(store).read(), step, store.url))


def resharded(source: Store, layout: Layout, target: Store | None = None) -> tuple[Store, Resharded]:
    target = MemoryStore() if target is None else target
    done = reshard(opened(source), Log(source).read(), target, layout, by="a test")
    return target, done


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# The property: random tensors and layouts, against the arrays themselves.

layouts = st.builds(
    lambda replicate, shard, tp, pp: Layout(replicate * shard, tp, pp, replicate),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
shapes = st.one_of(
    st.just(()),
    st.lists(st.sampled_from([0, 1, 2, 3, *ODD_ROWS]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(7, 13), (13, 7), (13, 600), (4000, 17)]),
)


@st.composite
def placements(draw: st.DrawFn, sizes: dict[str, int], dims: int) -> Placement:
    """Splits over some axes in any order (so strided ones too), pins on some of the others."""
    axes = draw(st.permutations(["pp", "dp_replicate", "dp_shard", "tp"]))
    uses = draw(st.lists(st.sampled_from(["split", "pin", "free"]), min_size=4, max_size=4))
    splits, pins = [], []
    for axis, use in zip(axes, uses, strict=True):
        if use == "split" and dims:
            splits.append(Split(axis, draw(st.integers(0, dims - 1))))
        elif use == "pin":
            coords = draw(st.sets(st.integers(0, sizes[axis] - 1), min_size=1))
            pins.append(Pin(axis, tuple(sorted(coords))))
    return Placement(tuple(splits), tuple(sorted(pins, key=lambda pin: pin.axis)))


@st.composite
def contents(draw: st.DrawFn) -> Content:
    grid = mesh_of(draw(layouts))
    sizes = {axis.name: axis.size for axis in grid.axes}
    content = Content({}, grid, values={"step": 1})
    for number in range(draw(st.integers(1, 5))):
        name, shape = f"t/{number}", draw(shapes)
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        content.tensors[name] = arange(shape, dtype)
        content.dtypes[name] = dtype
        content.placements[name] = draw(placements(sizes, len(shape)))
    return content


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(contents(), layouts)
def test_a_to_b_to_a_is_identity_and_b_equals_the_arrays(content: Content, layout: Layout) -> None:
    a = MemoryStore()
    make_store(a, content)
    b, _ = resharded(a, layout)
    there = opened(b)
    assert there.manifest.mesh == mesh_of(layout)
    assert not list(verify(b).findings)
    back, _ = resharded(b, Layout(1, 1, 1))
    for name, array in content.tensors.items():
        assert same_bits(there.read(name), array), name
        assert same_bits(opened(back).read(name), array), name
        pieces = [piece.reshape(-1) for _, piece in there.pieces(name, 64)]
        assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()

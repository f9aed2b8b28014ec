"""Random states and layouts to reshard, and what must come of it."""

from __future__ import annotations

import itertools
import json

import numpy as np
from hypothesis import strategies as st
from tests.kit.make_store import Content, arange, make_store

from keepstep.ckpt.address import find_live
from keepstep.ckpt.arrays import Array
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.layout import Layout, mesh_of
from keepstep.ckpt.log import Log
from keepstep.ckpt.placement import Pin, Placement, Split
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.ckpt.reshard import Resharded, reshard
from keepstep.ckpt.verify import verify
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

ODD_ROWS = (7, 13)

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
    """One to five tensors of any shape, dtype and placement over a random layout's mesh."""
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


def opened(store: Store, step: int | None = None) -> CheckpointReader:
    """The newest live checkpoint of a store, or that of `step`."""
    return open_checkpoint(store, find_live(Log(store).read(), step, store.url))


def resharded(
    source: Store, layout: Layout, target: Store | None = None
) -> tuple[Store, Resharded]:
    """The newest checkpoint of `source` in `layout`, in a store of its own."""
    target = MemoryStore() if target is None else target
    done = reshard(opened(source), Log(source).read(), target, layout, by="a test")
    return target, done


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_reshard(content: Content, layout: Layout) -> None:
    """Assert that A -> B -> A is the identity, and that B has the arrays that went in.

    B is read in three ways: by the reader, piece by piece, and by `naive` from the files alone.
    """
    a = MemoryStore()
    make_store(a, content)
    b, _ = resharded(a, layout)
    there = opened(b)
    assert there.manifest.mesh == mesh_of(layout)
    assert not list(verify(b).findings)
    axes = {axis.name: axis.size for axis in content.mesh.axes}
    replicate = axes["dp_replicate"]
    back_to = Layout(replicate * axes["dp_shard"], axes["tp"], axes["pp"], replicate)
    back = opened(resharded(b, back_to)[0])
    assert back.manifest.mesh == content.mesh
    for name, array in content.tensors.items():
        assert same_bits(there.read(name), array), name
        assert same_bits(back.read(name), array), name
        pieces = [piece.reshape(-1) for _, piece in there.pieces(name, 64)]
        assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes(), name
        if array.size <= 1_000:
            assert naive(b, name) == elements(array), name


def elements(array: Array) -> dict[tuple[int, ...], bytes]:
    """Index -> bytes of the element; its bits as they are, also those of odd bools."""
    data, size = array.tobytes(), array.itemsize
    indices = enumerate(np.ndindex(array.shape))
    return {index: data[number * size : (number + 1) * size] for number, index in indices}


def naive(store: Store, name: str) -> dict[tuple[int, ...], bytes]:
    """A tensor as index -> bytes of the element, put together from the files by hand."""
    found: dict[tuple[int, ...], bytes] = {}
    for info in store.list("states/"):
        if not info.key.endswith(".safetensors"):
            continue
        raw = store.get(info.key, 1 << 30)
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        parts = json.loads(header.pop("__metadata__")["tensors"])
        part = dict(zip(header, parts, strict=True)).get(name)
        if part is None:
            continue
        entry = header[name]
        sizes = part[2] if len(part) == 4 else entry["shape"]
        offsets = part[1] if part else [0] * len(sizes)
        start, end = entry["data_offsets"]
        data = raw[8 + length + start : 8 + length + end]
        places = list(itertools.product(*map(range, sizes)))
        size = len(data) // len(places)
        for number, place in enumerate(places):
            index = tuple(o + i for o, i in zip(offsets, place, strict=True))
            assert index not in found, "an element was written twice"
            found[index] = data[number * size : (number + 1) * size]
    return found

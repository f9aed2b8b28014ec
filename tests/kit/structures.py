"""Random meshes, placements, tensors and boxes for property tests (hypothesis strategies)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.manifest import TensorSpec
from keepstep.ckpt.placement import Mesh, MeshAxis, Pin, Placement, Split
from keepstep.ckpt.region import Box

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
RANKS_MAX = 24


@dataclass(frozen=True)
class Drawn:
    """A mesh, placements over it, and tensors with these placements."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    tensors: dict[str, TensorSpec]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One to four axes, at most 24 ranks; sizes that divide nothing are as likely as others."""
    sizes = []
    room = RANKS_MAX
    for _ in range(draw(st.integers(1, len(AXES)))):
        size = draw(st.integers(1, min(room, 7)))
        sizes.append(size)
        room //= size
    return Mesh(tuple(MeshAxis(AXES[i], size) for i, size in enumerate(sizes)))


@st.composite
def placements(draw: st.DrawFn, mesh: Mesh, dims: int) -> Placement:
    """Any order of splits (so strided ones too), several on one dim, and pins."""
    axes = draw(st.permutations(mesh.axes))
    splits, pins = [], []
    for axis in axes:
        use = draw(st.sampled_from(("split", "split", "replicate", "pin")))
        if use == "split" and dims:
            splits.append(Split(axis.name, draw(st.integers(0, dims - 1))))
        elif use == "pin":
            coords = draw(st.sets(st.integers(0, axis.size - 1), min_size=1))
            pins.append(Pin(axis.name, tuple(sorted(coords))))
    return Placement(tuple(splits), tuple(sorted(pins, key=lambda pin: pin.axis)))


def shapes(length_max: int) -> st.SearchStrategy[tuple[int, ...]]:
    """0 to 3 dims; 0, 1, 7 and 13 are frequent lengths."""
    lengths = st.sampled_from((0, 1, 2, 7, 13)) | st.integers(0, length_max)
    return st.lists(lengths, max_size=3).map(tuple)


@st.composite
def structures(draw: st.DrawFn, length_max: int = 20, mesh: Mesh | None = None) -> Drawn:
    """Up to five tensors over one mesh."""
    drawn_mesh = mesh if mesh is not None else draw(meshes())
    tensors = {}
    used: list[Placement] = []
    for index in range(draw(st.integers(0, 5))):
        shape = draw(shapes(length_max))
        placement = draw(placements(drawn_mesh, len(shape)))
        if placement not in used:
            used.append(placement)
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        tensors[f"model/t{index}"] = TensorSpec(shape, dtype, used.index(placement))
    return Drawn(drawn_mesh, tuple(used), tensors)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside `shape`, perhaps empty."""
    offsets, sizes = [], []
    for length in shape:
        start = draw(st.integers(0, length))
        offsets.append(start)
        sizes.append(draw(st.integers(0, length - start)))
    return Box(tuple(offsets), tuple(sizes))

"""How a global tensor lies over a mesh of ranks: plain data, and the arithmetic on it.

A mesh is an ordered list of named axes; rank = row-major index of its coordinates, the last axis
fastest. A placement is an ordered list of splits. Each split cuts, along one tensor dim, the part
that the splits before it left, into ceil-sized chunks over one mesh axis (torch.chunk's rule: the
last chunks may be smaller, or empty). So "the TP chunk, then the dp chunk inside it", which torch
calls `_StridedShard`, is simply ``(Split("tp", 0), Split("dp", 0))``: no stride is needed.
An axis that no split names replicates the tensor, unless `at` pins the tensor to some of the axis's
coordinates (a pipeline stage, or one rank's own state).
"""

from __future__ import annotations

import msgspec


class MeshAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One axis: its name (unique in the mesh) and its number of coordinates (>= 1)."""

    name: str
    size: int


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The grid of ranks, outermost axis first."""

    axes: tuple[MeshAxis, ...]


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cut tensor dim `dim` over mesh axis `axis`."""

    axis: str
    dim: int


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensor exists only at these coordinates (ascending, distinct) of `axis`."""

    axis: str
    coords: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Splits in the order in which they are applied, and pins (at most one per axis, sorted)."""

    splits: tuple[Split, ...] = ()
    at: tuple[Pin, ...] = ()

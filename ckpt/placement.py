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

import re
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod
from typing import TypeAlias

import msgspec

from keepstep.ckpt.errors import PlacementError
from keepstep.ckpt.region import Box

Coords: TypeAlias = tuple[tuple[int, ...], ...]
"""Per axis of a mesh, some of its coordinates: the product of them is a set of ranks."""

_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


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


AXES_MAX = 16
RANKS_MAX = 100_000
"""Ranks have five digits in keys."""
DIMS_MAX = 64


def mesh_size(mesh: Mesh) -> int:
    """Number of ranks."""
    return prod(axis.size for axis in mesh.axes)


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Coordinates of `rank`, one per axis. Raises PlacementError if the mesh has no such rank."""
    if not 0 <= rank < mesh_size(mesh):
        raise PlacementError(f"rank {rank} is not one of the {mesh_size(mesh)} of {_named(mesh)}")
    coords = []
    for axis in reversed(mesh.axes):
        rank, coord = divmod(rank, axis.size)
        coords.append(coord)
    return tuple(reversed(coords))


def rank_at(mesh: Mesh, coords: Sequence[int]) -> int:
    """The rank at these coordinates, one per axis."""
    rank = 0
    for axis, coord in zip(mesh.axes, coords, strict=True):
        if not 0 <= coord < axis.size:
            raise PlacementError(f"coordinate {coord} is not on axis {axis.name} of {_named(mesh)}")
        rank = rank * axis.size + coord
    return rank


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of chunk `index` when `length` is cut into `parts` chunks of ceil size.

    The last chunks may be smaller, or empty; an empty one starts at `length`.
    """
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def local_box(
    shape: tuple[int, ...], placement: Placement, mesh: Mesh, where: int | Sequence[int]
) -> Box | None:
    """The part of a tensor of this global shape that a rank holds; None if pinned elsewhere.

    `where` is the rank, or its coordinates. The box may be empty. Raises PlacementError for a rank
    that the mesh does not have; the placement must have passed `check_placement`.
    """
    coords = coordinates(mesh, where) if isinstance(where, int) else where
    at = {axis.name: coord for axis, coord in zip(mesh.axes, coords, strict=True)}
    if any(at[pin.axis] not in pin.coords for pin in placement.at):
        return None
    sizes_of = {axis.name: axis.size for axis in mesh.axes}
    offsets, sizes = [0] * len(shape), list(shape)
    for split in placement.splits:
        start, size = chunk(sizes[split.dim], sizes_of[split.axis], at[split.axis])
        offsets[split.dim] += start
        sizes[split.dim] = size
    return Box(tuple(offsets), tuple(sizes))


def allowed_coords(placement: Placement, mesh: Mesh, coords: Sequence[int]) -> Coords | None:
    """Per axis, the coordinates at which others hold the same box as the rank at `coords`.

    On an axis that a split names, only its own; else the pinned ones, or all. None if that rank
    holds nothing of the tensor.
    """
    split = {split.axis for split in placement.splits}
    pins = {pin.axis: pin.coords for pin in placement.at}
    allowed: list[tuple[int, ...]] = []
    for axis, coord in zip(mesh.axes, coords, strict=True):
        if axis.name in split:
            allowed.append((coord,))
        elif axis.name in pins:
            if coord not in pins[axis.name]:
                return None
            allowed.append(pins[axis.name])
        else:
            allowed.append(tuple(range(axis.size)))
    return tuple(allowed)


def holders(placement: Placement, mesh: Mesh, rank: int) -> list[int]:
    """All ranks that hold the same box as `rank`, itself among them, ascending; [] if it has none.

    Boxes that are empty count as the same only where the splits' coordinates are the same.
    """
    allowed = allowed_coords(placement, mesh, coordinates(mesh, rank))
    if allowed is None:
        return []
    return [rank_at(mesh, coords) for coords in product(*allowed)]


def check_mesh(mesh: Mesh) -> None:
    """Raise PlacementError unless axis names are distinct, sizes >= 1, and ranks within bounds."""
    names = [axis.name for axis in mesh.axes]
    if len(mesh.axes) > AXES_MAX:
        raise PlacementError(f"a mesh has at most {AXES_MAX} axes, this one has {len(mesh.axes)}")
    for axis in mesh.axes:
        if _AXIS_NAME.fullmatch(axis.name) is None:
            raise PlacementError(f"axis name {axis.name[:100]!r} is not a short identifier")
        if not 1 <= axis.size <= RANKS_MAX:
            raise PlacementError(f"axis {axis.name} has size {axis.size}, not 1 to {RANKS_MAX}")
    if len(set(names)) != len(names):
        raise PlacementError(f"axis names of {_named(mesh)} are not distinct")
    if mesh_size(mesh) > RANKS_MAX:
        raise PlacementError(f"{_named(mesh)} has {mesh_size(mesh)} ranks, over {RANKS_MAX}")


def check_placement(placement: Placement, mesh: Mesh, dims: int | None = None) -> None:
    """Raise PlacementError unless the placement fits the mesh and a tensor of `dims` dims.

    `dims` None leaves the tensor out. An axis may be split or pinned once, and not both.
    """
    sizes = {axis.name: axis.size for axis in mesh.axes}
    used: set[str] = set()
    for split in placement.splits:
        _check_axis(split.axis, sizes, used, mesh)
        if split.dim < 0 or (dims is not None and split.dim >= dims):
            has = "" if dims is None else f" of a tensor that has {dims}"
            raise PlacementError(f"axis {split.axis} splits dim {split.dim}{has}")
    for pin in placement.at:
        _check_axis(pin.axis, sizes, used, mesh)
        coords = pin.coords
        in_order = all(a < b for a, b in pairwise(coords))
        if not coords or not in_order or coords[0] < 0 or coords[-1] >= sizes[pin.axis]:
            raise PlacementError(
                f"pin on axis {pin.axis} (size {sizes[pin.axis]}) must have ascending, distinct "
                f"coordinates of it, found {str(coords)[:100]}"
            )
    if list(placement.at) != sorted(placement.at, key=lambda pin: pin.axis):
        raise PlacementError(f"pins are not sorted by axis: {str(placement.at)[:200]}")


def _check_axis(name: str, sizes: dict[str, int], used: set[str], mesh: Mesh) -> None:
    if name not in sizes:
        raise PlacementError(f"no axis {name[:100]!r} in {_named(mesh)}")
    if name in used:
        raise PlacementError(f"axis {name} is split or pinned twice")
    used.add(name)


def _named(mesh: Mesh) -> str:
    """The mesh as people write it, such as ``mesh pp=2,tp=4``."""
    return "mesh " + ",".join(f"{axis.name[:100]}={axis.size}" for axis in mesh.axes)

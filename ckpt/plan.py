"""Which bytes each rank writes: its share of what it holds. No collective needed (DESIGN D3).

Ranks that hold the same boxes form a *holder group*. Think of all boxes of a group laid end to end,
in the order of their names, as one line of bytes. The line is cut into equal parts, one for each
holder. A tensor that lies across a cut is cut there too, into slabs; all others are written whole
by one rank. So parts are even by bytes, at most one tensor per cut is split, and each holder knows
the cuts from what it holds itself: a group's line has only tensors that all of its ranks hold.

Cuts keep away from a tensor's ends by `PIECE_BYTES_MIN`, and a line too short to give everybody
that much is shared by fewer. Empty boxes are written by nobody.

The functions here are the specification of who owns what: a reader uses `Plan.owners` to find the
image that has a region. Changing them changes the format.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.errors import PlacementError
from keepstep.ckpt.placement import (
    Coords,
    Mesh,
    Placement,
    allowed_coords,
    check_mesh,
    check_placement,
    chunk,
    coordinates,
    rank_at,
)
from keepstep.ckpt.region import Box, Region, intersect

if TYPE_CHECKING:  # `manifest` imports this file: it checks its own plan digest
    from keepstep.ckpt.manifest import TensorSpec

PIECE_BYTES_MIN = 1 << 16
"""No piece of a split tensor is much smaller than this."""

_SLABS_PER_PART = 64
"""Slabs are thin enough that rounding to them moves a cut by at most this fraction of a part."""

_Splits: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """The boxes of one holder group, end to end.

    Attributes:
        group: the holders, as coordinates per axis.
        names: tensors with at least one byte, sorted.
        shapes: the global shape of each.
        splits: how each is cut down to the group's box: (dim, parts, which part), in order.
        starts: where each begins on the line, in bytes, and at the end the line's length.
        cuts: where the parts begin, and at the end the line's length.
    """

    group: Coords
    names: list[str]
    shapes: list[tuple[int, ...]]
    splits: list[_Splits]
    starts: list[int]
    cuts: list[int]

    @property
    def parts(self) -> int:
        return len(self.cuts) - 1

    def part_of(self, mesh: Mesh, rank: int) -> int | None:
        """Which part `rank`, one of the holders, writes; None if the line is too short for it."""
        index, holders = 0, 1
        for coord, allowed in zip(coordinates(mesh, rank), self.group, strict=True):
            index = index * len(allowed) + bisect_left(allowed, coord)
            holders *= len(allowed)
        part = -(-index * self.parts // holders)
        return part if part < self.parts and part * holders // self.parts == index else None

    def rank_of(self, mesh: Mesh, part: int) -> int:
        """The rank that writes `part`."""
        index = part * prod(map(len, self.group)) // self.parts
        coords = []
        for allowed in reversed(self.group):
            index, place = divmod(index, len(allowed))
            coords.append(allowed[place])
        return rank_at(mesh, coords[::-1])

    def slab(self, index: int, part: int) -> Box | None:
        """What of tensor `index` lies in `part`; None if nothing does."""
        start, end = self.starts[index], self.starts[index + 1]
        if self.cuts[part] <= start and end <= self.cuts[part + 1]:
            return _box_at(self.shapes[index], self.splits[index])
        box = _box_at(self.shapes[index], self.splits[index])
        dim = self._slab_dim(index, box.sizes)
        low = self._cut_index(index, box.sizes, dim, self.cuts[part])
        high = self._cut_index(index, box.sizes, dim, self.cuts[part + 1])
        if low >= high:
            return None
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += low
        sizes[dim] = high - low
        return Box(tuple(offsets), tuple(sizes))

    def _slab_dim(self, index: int, sizes: tuple[int, ...]) -> int:
        """The outermost dim along which slabs are thin enough to cut evenly; else the longest.

        A 0-d tensor is never cut: it is smaller than two pieces. So is one without a dim > 1.
        """
        size_bytes = self.starts[index + 1] - self.starts[index]
        thin = max(PIECE_BYTES_MIN, self.starts[-1] // (self.parts * _SLABS_PER_PART))
        for dim, size in enumerate(sizes):
            if size_bytes <= thin * size:
                return dim
        return sizes.index(max(sizes)) if sizes else 0

    def _cut_index(self, index: int, sizes: tuple[int, ...], dim: int, cut: int) -> int:
        """The index along `dim` at which the tensor is cut for a cut of the line at byte `cut`."""
        length = sizes[dim] if sizes else 1
        size_bytes = self.starts[index + 1] - self.starts[index]
        place = cut - self.starts[index]
        if min(place, size_bytes - place) < PIECE_BYTES_MIN:
            return 0 if 2 * place <= size_bytes else length
        return (2 * place * length + size_bytes) // (2 * size_bytes)


def _box_at(shape: tuple[int, ...], splits: _Splits) -> Box:
    """What is left of a tensor of this shape after `splits`."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, parts, index in splits:
        start, size = chunk(sizes[dim], parts, index)
        offsets[dim] += start
        sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def _volume_at(shape: tuple[int, ...], splits: _Splits) -> int:
    """Number of elements of `_box_at`; called for every tensor, so without making a box."""
    sizes = list(shape)
    for dim, parts, index in splits:
        length = sizes[dim]
        step = -(-length // parts)
        left = length - index * step
        sizes[dim] = step if left > step else left if left > 0 else 0
    return prod(sizes)


class Plan:
    """Who owns what, for one structure. Lines are made when first asked for, and kept.

    Raises PlacementError at once for a mesh or a placement that cannot be. Not safe for use by
    several threads.
    """

    def __init__(
        self, mesh: Mesh, placements: Sequence[Placement], tensors: Mapping[str, TensorSpec]
    ) -> None:
        check_structure(mesh, placements, tensors)
        self._mesh = mesh
        self._axis_index = {axis.name: i for i, axis in enumerate(mesh.axes)}
        self._placements = tuple(placements)
        self._tensors = tensors
        self._names: list[list[str]] = [[] for _ in placements]
        for name in sorted(tensors):
            self._names[tensors[name].placement].append(name)
        self._groups: dict[tuple[int, ...], dict[Coords, list[int]]] = {}
        self._lines: dict[Coords, _Line] = {}
        self._leaf_lines: dict[tuple[int, tuple[int, ...]], _Line] = {}
        # Most tensors of a model share a few shapes, and a rank needs the same box of them.
        self._leaves: dict[tuple[int, tuple[int, ...], Box], tuple[tuple[int, ...], ...]] = {}

    def owned(self, rank: int) -> dict[str, Box]:
        """The box of each tensor that `rank` writes, in global coordinates. None is empty.

        Over all ranks, the boxes of a tensor cover it exactly once.
        """
        boxes: dict[str, Box] = {}
        for group in self._groups_at(coordinates(self._mesh, rank)):
            line = self._line(group)
            part = line.part_of(self._mesh, rank)
            if part is None:
                continue
            first = max(bisect_right(line.starts, line.cuts[part]) - 1, 0)
            for index in range(first, bisect_left(line.starts, line.cuts[part + 1])):
                box = line.slab(index, part)
                if box is not None:
                    boxes[line.names[index]] = box
        return boxes

    def owners(self, region: Region) -> list[tuple[int, Box]]:
        """The (rank, owned box) pairs that have something of `region`, by offsets.

        Each box is all that the rank owns of the tensor there, and may reach beyond the region.
        Raises KeyError for a tensor that the plan does not have.
        """
        spec = self._tensors[region.name]
        found = []
        key = (spec.placement, spec.shape, region.box)
        leaves = self._leaves.get(key)
        if leaves is None:
            leaves = self._leaves[key] = tuple(self._coords_over(spec, region.box))
        for coords in leaves:
            line = self._leaf_line(spec.placement, coords)
            index = bisect_left(line.names, region.name)
            first = bisect_right(line.cuts, line.starts[index]) - 1
            for part in range(first, bisect_left(line.cuts, line.starts[index + 1])):
                box = line.slab(index, part)
                if box is not None and intersect(box, region.box) is not None:
                    found.append((line.rank_of(self._mesh, part), box))
        return sorted(found, key=lambda pair: pair[1])

    def _groups_at(self, coords: tuple[int, ...]) -> dict[Coords, list[int]]:
        """The holder groups of the rank at `coords`, each with the placements that make it."""
        groups = self._groups.get(coords)
        if groups is None:
            groups = {}
            for index, placement in enumerate(self._placements):
                group = allowed_coords(placement, self._mesh, coords)
                if group is not None and self._names[index]:
                    groups.setdefault(group, []).append(index)
            self._groups[coords] = groups
        return groups

    def _line(self, group: Coords) -> _Line:
        line = self._lines.get(group)
        if line is None:
            coords = tuple(allowed[0] for allowed in group)
            line = self._laid_out(group, coords, self._groups_at(coords)[group])
            self._lines[group] = line
        return line

    def _laid_out(self, group: Coords, coords: tuple[int, ...], members: list[int]) -> _Line:
        """The line of the tensors with the placements `members`, at `coords`."""
        entries: list[tuple[str, tuple[int, ...], _Splits, int]] = []
        for member in members:
            splits = self._splits_at(self._placements[member], coords)
            known: dict[tuple[tuple[int, ...], str], int] = {}
            for name in self._names[member]:
                spec = self._tensors[name]
                key = (spec.shape, spec.dtype)
                size_bytes = known.get(key)
                if size_bytes is None:
                    size_bytes = _volume_at(spec.shape, splits) * DTYPES[spec.dtype].itemsize
                    known[key] = size_bytes
                if size_bytes:
                    entries.append((name, spec.shape, splits, size_bytes))
        if len(members) > 1:
            entries.sort(key=itemgetter(0))
        starts = [0, *accumulate(entry[3] for entry in entries)]
        total = starts[-1]
        parts = max(1, min(prod(map(len, group)), total // PIECE_BYTES_MIN))
        return _Line(
            group=group,
            names=[entry[0] for entry in entries],
            shapes=[entry[1] for entry in entries],
            splits=[entry[2] for entry in entries],
            starts=starts,
            cuts=[total * part // parts for part in range(parts + 1)],
        )

    def _splits_at(self, placement: Placement, coords: tuple[int, ...]) -> _Splits:
        splits = []
        for split in placement.splits:
            axis = self._axis_index[split.axis]
            splits.append((split.dim, self._mesh.axes[axis].size, coords[axis]))
        return tuple(splits)

    def _coords_over(self, spec: TensorSpec, box: Box) -> Iterator[tuple[int, ...]]:
        """For each holder group whose box meets `box`, the coordinates of its first rank.

        Steps over chunks that do not meet the box by arithmetic, without looking at them.
        """
        if box.is_empty or 0 in spec.shape:
            return
        placement = self._placements[spec.placement]
        base = [0] * len(self._mesh.axes)
        for pin in placement.at:
            base[self._axis_index[pin.axis]] = pin.coords[0]
        states = [(base, (0,) * len(spec.shape), spec.shape)]
        for split in placement.splits:
            axis, dim = self._axis_index[split.axis], split.dim
            axis_size = self._mesh.axes[axis].size
            after = []
            for coords, offsets, sizes in states:
                low = max(box.offsets[dim] - offsets[dim], 0)
                high = min(box.offsets[dim] + box.sizes[dim] - offsets[dim], sizes[dim])
                step = -(-sizes[dim] // axis_size)
                for index in range(low // step, -(-high // step) if low < high else 0):
                    start, size = chunk(sizes[dim], axis_size, index)
                    after.append(
                        (
                            [*coords[:axis], index, *coords[axis + 1 :]],
                            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                            (*sizes[:dim], size, *sizes[dim + 1 :]),
                        )
                    )
            states = after
        for coords, _, _ in states:
            yield tuple(coords)

    def _leaf_line(self, placement: int, coords: tuple[int, ...]) -> _Line:
        line = self._leaf_lines.get((placement, coords))
        if line is None:
            group = allowed_coords(self._placements[placement], self._mesh, coords)
            if group is None:
                raise PlacementError(f"placement {placement} has no holder at {coords}")
            line = self._leaf_lines[placement, coords] = self._line(group)
        return line


def owned(
    mesh: Mesh, placements: Sequence[Placement], tensors: Mapping[str, TensorSpec], rank: int
) -> dict[str, Box]:
    """As `Plan.owned`. Needs only those tensors that `rank` holds; others change nothing."""
    return Plan(mesh, placements, tensors).owned(rank)


def owners(
    mesh: Mesh,
    placements: Sequence[Placement],
    tensors: Mapping[str, TensorSpec],
    region: Region,
) -> list[tuple[int, Box]]:
    """As `Plan.owners`. For more than one region, make the plan once."""
    return Plan(mesh, placements, tensors).owners(region)


def check_structure(
    mesh: Mesh, placements: Sequence[Placement], tensors: Mapping[str, TensorSpec]
) -> None:
    """Raise PlacementError unless mesh, placements and tensors fit each other."""
    check_mesh(mesh)
    for placement in placements:
        check_placement(placement, mesh)
    checked: set[tuple[int, int]] = set()
    for name, spec in tensors.items():
        if spec.dtype not in DTYPES:
            raise PlacementError(f"tensor {name!r}: no dtype {spec.dtype[:100]!r} in the format")
        key = (spec.placement, len(spec.shape))
        if key in checked:
            continue
        if not 0 <= spec.placement < len(placements):
            raise PlacementError(
                f"tensor {name!r}: placement {spec.placement} of only {len(placements)}"
            )
        try:
            check_placement(placements[spec.placement], mesh, len(spec.shape))
        except PlacementError as error:
            raise PlacementError(f"tensor {name!r}: {error}") from error
        checked.add(key)


def plan_digest(
    mesh: Mesh, placements: Sequence[Placement], tensors: Mapping[str, TensorSpec]
) -> str:
    """Digest of the whole structure, 32 hex digits: ranks with equal digests planned alike.

    Does not depend on the order of `tensors`, nor on the order or surplus of `placements`.
    """
    encoded = [msgspec.json.encode(placement) for placement in placements]
    used = sorted({encoded[spec.placement] for spec in tensors.values()})
    place = {text: index for index, text in enumerate(used)}
    of = [place.get(text, -1) for text in encoded]
    rows = sorted(
        (name, spec.shape, spec.dtype, of[spec.placement]) for name, spec in tensors.items()
    )
    document = [1, mesh, [msgspec.Raw(text) for text in used], rows]
    return digest128(msgspec.json.encode(document))

"""Boxes and regions: the one abstraction that saving, restoring, resharding and comparing share.

A box is an axis-aligned part of a tensor. All arithmetic is on plain integers (DESIGN D1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` of a tensor.

    A 0-d tensor has the box ``Box((), ())``, of one element. A size of 0 makes the box empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.sizes

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box (an empty box is in every box)."""
        if other.is_empty:
            return True
        return all(
            mine <= theirs and theirs + their_size <= mine + my_size
            for mine, my_size, theirs, their_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box of the *global* tensor called `name`."""

    name: str
    box: Box


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that are in both; None if there are none."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(
        min(a_offset + a_size, b_offset + b_size) - offset
        for a_offset, a_size, b_offset, b_size, offset in zip(
            a.offsets, a.sizes, b.offsets, b.sizes, offsets, strict=True
        )
    )
    if any(size <= 0 for size in sizes):
        return None
    return Box(offsets, sizes)


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint, non-empty boxes that together are the elements of `a` that are not in `b`.

    At most two per dim.
    """
    common = intersect(a, b)
    if common is None:
        return [] if a.is_empty else [a]
    pieces = []
    offsets, sizes = list(a.offsets), list(a.sizes)
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before = start - offsets[dim]
        after = offsets[dim] + sizes[dim] - (start + size)
        for offset, length in ((offsets[dim], before), (start + size, after)):
            if length > 0:
                piece_offsets, piece_sizes = offsets.copy(), sizes.copy()
                piece_offsets[dim], piece_sizes[dim] = offset, length
                pieces.append(Box(tuple(piece_offsets), tuple(piece_sizes)))
        offsets[dim], sizes[dim] = start, size
    return pieces


def covers(boxes: Iterable[Box], target: Box) -> bool:
    """Whether every element of `target` is in at least one of `boxes` (which may overlap)."""
    left = [] if target.is_empty else [target]
    for box in boxes:
        if not left:
            return True
        left = [piece for part in left for piece in subtract(part, box)]
    return not left


def relative_to(inner: Box, outer: Box) -> Box:
    """`inner` in the coordinates of `outer`: as an index into an array that holds just `outer`.

    Raises ValueError if `inner` is not inside.
    """
    if not outer.contains(inner):
        raise ValueError(f"{inner} is not inside {outer}")
    offsets = tuple(mine - base for mine, base in zip(inner.offsets, outer.offsets, strict=True))
    return Box(offsets, inner.sizes)


def runs(box: Box, within: Box, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """The contiguous byte runs of `box` inside a row-major array that holds just `within`.

    Yields (offset in the array of `within`, offset in an array that holds just `box`, length), all
    in bytes, ascending, each as long as can be. Raises ValueError if `box` is not inside `within`.
    """
    local = relative_to(box, within)
    if box.is_empty:
        return
    # Trailing dims that the box spans whole, and one dim more, make one run.
    outer, length = len(box.sizes), itemsize
    while outer > 0:
        outer -= 1
        length *= box.sizes[outer]
        if box.sizes[outer] != within.sizes[outer]:
            break
    steps_of = strides(within.sizes, itemsize)
    first = sum(offset * step for offset, step in zip(local.offsets, steps_of, strict=True))
    steps = (
        range(0, size * stride, stride)
        for size, stride in zip(box.sizes[:outer], steps_of[:outer], strict=True)
    )
    for index, step in enumerate(product(*steps)):
        yield first + sum(step), index * length, length


def strides(sizes: tuple[int, ...], itemsize: int = 1) -> tuple[int, ...]:
    """From one index to the next along each dim of a row-major array: in bytes, or in elements."""
    steps = []
    step = itemsize
    for size in reversed(sizes):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def slices(box: Box) -> tuple[slice, ...]:
    """`box` as an index into an array."""
    return tuple(
        slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)
    )

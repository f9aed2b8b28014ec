"""Boxes against sets of indices and against numpy's slices: two independent implementations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.structures import boxes_in, shapes

from keepstep.ckpt.region import Box, covers, intersect, relative_to, runs, subtract, whole

_SHAPES = shapes(6)


@st.composite
def _shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(_SHAPES)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def _indices(box: Box) -> set[tuple[int, ...]]:
    ranges = (
        range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)
    )
    return set(product(*ranges))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)
    )


@given(_shape_and_boxes(2))
def test_intersection_and_difference_are_those_of_the_sets_of_indices(
    drawn: tuple[tuple[int, ...], list[Box]],
) -> None:
    _, (a, b) = drawn
    common = intersect(a, b)
    assert (set() if common is None else _indices(common)) == _indices(a) & _indices(b)
    pieces = subtract(a, b)
    assert len(pieces) <= 2 * len(a.sizes) + 1
    assert all(not piece.is_empty for piece in pieces)
    assert sum(piece.volume for piece in pieces) == len(_indices(a) - _indices(b))
    assert set().union(*map(_indices, pieces)) == _indices(a) - _indices(b)
    assert a.contains(b) == (_indices(b) <= _indices(a))


def test_every_pair_of_boxes_in_a_small_matrix() -> None:
    intervals = [(start, size) for start in range(3) for size in range(1, 4 - start)]
    boxes = [Box((a, b), (c, d)) for (a, c), (b, d) in product(intervals, intervals)]
    for a, b in product(boxes, boxes):
        common = intersect(a, b)
        assert (set() if common is None else _indices(common)) == _indices(a) & _indices(b)
        pieces = subtract(a, b)
        assert sum(piece.volume for piece in pieces) == len(_indices(a) - _indices(b))
        assert set().union(*map(_indices, pieces)) == _indices(a) - _indices(b)
        assert covers([b, *pieces], a)


@given(_shape_and_boxes(5))
def test_boxes_cover_a_target_exactly_if_no_index_is_left(
    drawn: tuple[tuple[int, ...], list[Box]],
) -> None:
    _, (target, *boxes) = drawn
    left = _indices(target).difference(*map(_indices, boxes))
    assert covers(boxes, target) == (not left)


@given(_shape_and_boxes(2), st.sampled_from((1, 2, 8, 16)))
def test_runs_are_the_bytes_of_a_numpy_slice_and_as_long_as_can_be(
    drawn: tuple[tuple[int, ...], list[Box]], itemsize: int
) -> None:
    shape, (within, other) = drawn
    box = intersect(within, other)
    if box is None:
        return
    every = np.arange(int(np.prod(shape)) * itemsize, dtype=np.uint32)
    array = every.reshape(*shape, itemsize)[_slices(within)]
    expected = array[_slices(relative_to(box, within))].reshape(-1)
    flat = array.reshape(-1)
    found = list(runs(box, within, itemsize))
    got = np.concatenate([flat[start : start + length] for start, _, length in found])
    assert np.array_equal(got, expected)
    ends = [(start + length, inner + length) for start, inner, length in found]
    assert [inner for _, inner, _ in found] == [0, *(inner for _, inner in ends[:-1])]
    assert all(end < start for (end, _), (start, _, _) in zip(ends[:-1], found[1:], strict=True))


def test_a_scalar_is_one_run_and_an_empty_box_none() -> None:
    assert list(runs(Box((), ()), Box((), ()), 8)) == [(0, 0, 8)]
    assert list(runs(Box((0, 2), (3, 0)), whole((3, 4)), 8)) == []
    assert Box((), ()).volume == 1
    assert not Box((), ()).is_empty
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert subtract(Box((), ()), Box((), ())) == []


def test_runs_of_whole_rows_join_to_one() -> None:
    assert list(runs(Box((1, 0, 0), (2, 5, 4)), whole((9, 5, 4)), 2)) == [(40, 0, 80)]
    assert list(runs(Box((1, 1, 0), (2, 1, 4)), whole((9, 5, 4)), 2)) == [(48, 0, 8), (88, 8, 8)]


def test_an_inner_box_that_reaches_out_is_refused() -> None:
    with pytest.raises(ValueError, match="is not inside"):
        relative_to(Box((2,), (3,)), Box((0,), (4,)))
    with pytest.raises(ValueError, match="is not inside"):
        list(runs(Box((2,), (3,)), Box((0,), (4,)), 1))


def test_boxes_of_tensors_beyond_four_gigabytes_keep_exact_offsets() -> None:
    tensor = whole((1 << 20, 1 << 20))
    [(start, inner, length)] = runs(Box(((1 << 20) - 1, 0), (1, 1 << 20)), tensor, 8)
    assert (start, inner, length) == ((1 << 43) - (1 << 23), 0, 1 << 23)

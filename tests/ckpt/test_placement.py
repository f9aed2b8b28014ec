"""The arithmetic of placements against numpy arrays that are really cut up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from tests.kit.structures import Drawn, structures

from keepstep.ckpt.errors import PlacementError
from keepstep.ckpt.placement import (
    Mesh,
    MeshAxis,
    Pin,
    Placement,
    Split,
    check_mesh,
    check_placement,
    chunk,
    coordinates,
    holders,
    local_box,
    mesh_size,
    rank_at,
)

_TP2_DP3 = Mesh((MeshAxis("dp", 3), MeshAxis("tp", 2)))


def _cut(
    array: npt.NDArray[np.int64], placement: Placement, mesh: Mesh, rank: int
) -> npt.NDArray[np.int64]:
    """What `rank` holds, by cutting the array itself, as torch.chunk and its padding would."""
    coords = dict(zip((axis.name for axis in mesh.axes), coordinates(mesh, rank), strict=True))
    sizes = {axis.name: axis.size for axis in mesh.axes}
    for split in placement.splits:
        step = -(-array.shape[split.dim] // sizes[split.axis])
        low = coords[split.axis] * step
        index = [slice(None)] * array.ndim
        index[split.dim] = slice(low, low + step)
        array = array[tuple(index)]
    return array


@given(structures())
def test_local_boxes_are_what_cutting_the_array_gives(drawn: Drawn) -> None:
    for spec in drawn.tensors.values():
        placement = drawn.placements[spec.placement]
        array = np.arange(int(np.prod(spec.shape)), dtype=np.int64).reshape(spec.shape)
        for rank in range(mesh_size(drawn.mesh)):
            box = local_box(spec.shape, placement, drawn.mesh, rank)
            coords = coordinates(drawn.mesh, rank)
            names = [axis.name for axis in drawn.mesh.axes]
            pinned = all(coords[names.index(pin.axis)] in pin.coords for pin in placement.at)
            assert (box is not None) == pinned
            if box is None:
                continue
            index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            cut = _cut(array, placement, drawn.mesh, rank)
            assert cut.shape == box.sizes
            assert np.array_equal(array[index], cut)


@given(structures())
def test_holders_are_the_ranks_at_the_same_coordinates_of_the_splits(drawn: Drawn) -> None:
    names = [axis.name for axis in drawn.mesh.axes]
    for spec in drawn.tensors.values():
        placement = drawn.placements[spec.placement]
        places = [names.index(split.axis) for split in placement.splits]
        for rank in range(mesh_size(drawn.mesh)):
            mine = coordinates(drawn.mesh, rank)
            expected = [
                other
                for other in range(mesh_size(drawn.mesh))
                if local_box(spec.shape, placement, drawn.mesh, other) is not None
                and all(coordinates(drawn.mesh, other)[place] == mine[place] for place in places)
            ]
            holds = local_box(spec.shape, placement, drawn.mesh, rank) is not None
            assert holders(placement, drawn.mesh, rank) == (expected if holds else [])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Per rank of dp 3 x tp 2 (tp fastest): first row and number of rows; tp cuts first.
        (7, [(0, 2), (4, 1), (2, 2), (5, 1), (4, 0), (6, 1)]),
        (13, [(0, 3), (7, 2), (3, 3), (9, 2), (6, 1), (11, 2)]),
    ],
)
def test_rows_that_torch_itself_gets_wrong(rows: int, expected: list[tuple[int, int]]) -> None:
    placement = Placement((Split("tp", 0), Split("dp", 0)))
    found = [local_box((rows, 4), placement, _TP2_DP3, rank) for rank in range(6)]
    assert [(box.offsets[0], box.sizes[0]) for box in found if box is not None] == expected


def test_ranks_beyond_the_rows_hold_nothing_and_begin_at_the_end() -> None:
    assert [chunk(5, 30, index) for index in (0, 4, 5, 29)] == [(0, 1), (4, 1), (5, 0), (5, 0)]
    assert [chunk(0, 3, index) for index in range(3)] == [(0, 0)] * 3
    assert [chunk(4, 3, index) for index in range(3)] == [(0, 2), (2, 2), (4, 0)]


def test_ranks_are_row_major_and_the_last_axis_is_the_fastest() -> None:
    mesh = Mesh((MeshAxis("pp", 2), MeshAxis("dp", 3), MeshAxis("tp", 4)))
    assert coordinates(mesh, 0) == (0, 0, 0)
    assert coordinates(mesh, 1) == (0, 0, 1)
    assert coordinates(mesh, 23) == (1, 2, 3)
    assert [rank_at(mesh, coordinates(mesh, rank)) for rank in range(24)] == list(range(24))
    assert (mesh_size(Mesh(())), coordinates(Mesh(()), 0)) == (1, ())


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(PlacementError, match="is not one of the 6 of mesh dp=3,tp=2"):
        coordinates(_TP2_DP3, rank)


@pytest.mark.parametrize(
    ("placement", "dims", "reason"),
    [
        (Placement((Split("cp", 0),)), 1, "no axis 'cp' in mesh dp=3,tp=2"),
        (Placement((Split("tp", 1),)), 1, "axis tp splits dim 1 of a tensor that has 1"),
        (Placement((Split("tp", 0),)), 0, "splits dim 0 of a tensor that has 0"),
        (Placement((Split("tp", -1),)), None, "axis tp splits dim -1"),
        (Placement((Split("tp", 0), Split("tp", 1))), 2, "split or pinned twice"),
        (Placement((Split("tp", 0),), (Pin("tp", (0,)),)), 2, "split or pinned twice"),
        (Placement((), (Pin("tp", ()),)), 0, "ascending, distinct"),
        (Placement((), (Pin("tp", (1, 0)),)), 0, "ascending, distinct"),
        (Placement((), (Pin("dp", (1, 1)),)), 0, "ascending, distinct"),
        (Placement((), (Pin("tp", (2,)),)), 0, "ascending, distinct"),
        (Placement((), (Pin("tp", (-1,)),)), 0, "ascending, distinct"),
        (Placement((), (Pin("tp", (0,)), Pin("dp", (0,)))), 0, "not sorted by axis"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    placement: Placement, dims: int | None, reason: str
) -> None:
    with pytest.raises(PlacementError, match=reason):
        check_placement(placement, _TP2_DP3, dims)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ((MeshAxis("tp", 0),), "has size 0"),
        ((MeshAxis("tp", -2),), "has size -2"),
        ((MeshAxis("tp", 10**9),), "has size 1000000000"),
        ((MeshAxis("tp", 2), MeshAxis("tp", 2)), "are not distinct"),
        ((MeshAxis("a,b", 2),), "is not a short identifier"),
        ((MeshAxis("a", 1000), MeshAxis("b", 1000)), "has 1000000 ranks"),
        (tuple(MeshAxis(f"a{i}", 1) for i in range(17)), "at most 16 axes"),
    ],
)
def test_meshes_that_cannot_be_are_refused(axes: tuple[MeshAxis, ...], reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        check_mesh(Mesh(axes))

"""Comparing checkpoints: equal means equal bits, whatever the layouts."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kit.make_store import Content, arange, llama_state, make_store, mesh, split

from keepstep.ckpt.address import find_live
from keepstep.ckpt.arrays import NUMPY_DTYPES, Array
from keepstep.ckpt.diff import ELEMENTS_MAX, Diff, diff
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.layout import Layout
from keepstep.ckpt.log import Log
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.ckpt.reshard import reshard
from keepstep.storage.memory import MemoryStore

ONE = mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1)


def stored(content: Content) -> CheckpointReader:
    store = MemoryStore()
    make_store(store, content)
    return open_checkpoint(store, find_live(Log(store).read(), None, store.url))


def compared(a: Array, b: Array, dtype: str | None = None) -> Diff:
    """The diff of two checkpoints with one tensor "t", in two layouts."""
    dtypes = {} if dtype is None else {"t": dtype}
    two = mesh(pp=1, dp_replicate=1, dp_shard=2, tp=1)
    cut = {"t": split("dp_shard:0")} if a.ndim else {}
    return diff(
        stored(Content({"t": a}, ONE, dtypes=dtypes)),
        stored(Content({"t": b}, two, cut, dtypes=dtypes)),
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_equal_bits_are_the_same_in_any_type_and_one_flipped_bit_is_not(dtype: str) -> None:
    array = arange((7, 3), dtype)
    assert compared(array, array.copy(), dtype).is_same
    raw = bytearray(array.tobytes())
    raw[5 * array.itemsize] ^= 1
    other = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
    found = compared(array, other, dtype)
    assert [each.name for each in found.differing] == ["t"]
    assert (found.differing[0].elements, found.differing[0].differing) == (21, 1)
    assert not found.is_same


def test_the_largest_difference_is_measured_and_placed() -> None:
    a = np.full((5, 4), 8.0, np.float32)
    b = a.copy()
    b[3, 2], b[1, 1] = 10.0, 7.0
    worst = compared(a, b).differing[0]
    assert (worst.differing, worst.max_abs, worst.max_rel) == (2, 2.0, 0.2)
    assert worst.where == (3, 2)


def test_a_difference_beyond_the_first_piece_has_its_place_in_the_whole_tensor() -> None:
    a = np.zeros((4, ELEMENTS_MAX // 2), np.uint8)
    b = a.copy()
    b[3, 77] = 9
    worst = compared(a, b).differing[0]
    assert (worst.where, worst.max_abs, worst.differing) == ((3, 77), 9.0, 1)


@pytest.mark.parametrize(
    ("a", "b", "max_abs", "max_rel", "nan_against_number"),
    [
        (np.nan, np.nan, 0.0, 0.0, 0),
        (np.nan, 1.0, 0.0, 0.0, 1),
        (np.inf, np.inf, 0.0, 0.0, 0),
        (np.inf, 1.0, np.inf, 2.0, 0),
        (np.inf, -np.inf, np.inf, 2.0, 0),
        (0.0, -0.0, 0.0, 0.0, 0),
        (0.0, 2.0, 2.0, 1.0, 0),
        (1.5e308, -1.5e308, np.inf, 2.0, 0),
    ],
)
def test_what_is_no_number_is_told_apart(
    a: float, b: float, max_abs: float, max_rel: float, nan_against_number: int
) -> None:
    left, right = np.array([1.0, a]), np.array([1.0, b])
    found = compared(left, right)
    if left.tobytes() == right.tobytes():
        assert found.is_same
        return
    worst = found.differing[0]
    measured = (worst.max_abs, worst.max_rel, worst.nan_against_number)
    assert measured == (max_abs, max_rel, nan_against_number)


def test_two_nans_of_other_bits_differ_in_bits_only() -> None:
    bits = np.array([0x7FC00000, 0x7FC00001], np.uint32)
    worst = compared(bits[:1].view(np.float32), bits[1:].view(np.float32)).differing[0]
    assert (worst.differing, worst.max_abs, worst.nan_against_number) == (1, 0.0, 0)


def test_wide_integers_are_compared_exactly() -> None:
    a = np.array([2**63 - 1, -(2**63)], np.int64)
    b = np.array([2**63 - 2, 2**63 - 1], np.int64)
    worst = compared(a, b).differing[0]
    assert (worst.max_abs, worst.where) == (float(2**64 - 1), (1,))
    assert compared(a[:1], b[:1]).differing[0].max_abs == 1.0


def test_zero_dims_and_no_elements_are_compared_too() -> None:
    assert compared(np.array(2.0), np.array(2.0)).is_same
    assert compared(np.array(2.0), np.array(3.0)).differing[0].where == ()
    assert compared(np.zeros((0, 3)), np.zeros((0, 3))).is_same


def test_the_worst_is_first() -> None:
    base = {name: np.ones(4, np.float32) for name in "abcd"}
    other = {name: array.copy() for name, array in base.items()}
    other["a"][0], other["b"][0], other["c"][0] = 1.001, 100.0, np.nan
    found = diff(stored(Content(base, ONE)), stored(Content(other, ONE)))
    assert [each.name for each in found.differing] == ["c", "b", "a"]
    assert (found.identical, found.identical_bytes) == (1, 16)


def test_structure_and_values_that_differ_are_listed() -> None:
    a = Content(
        {"x": np.zeros(3), "s": np.zeros((2, 3)), "d": np.zeros(3), "only": np.zeros(1)},
        ONE,
        aliases={"tie": "x"},
        values={"step": 1, "config": {"lr": 0.1, "seed": 3}, "gone": None},
    )
    b = Content(
        {"x": np.zeros(3), "s": np.zeros((3, 2)), "d": np.zeros(3, np.float32), "tie": np.zeros(3)},
        ONE,
        values={"step": 2, "config": {"lr": 0.2, "seed": 3}},
    )
    found = diff(stored(a), stored(b))
    assert (found.only_in_a, found.only_in_b) == (["only"], [])
    assert found.changed == {
        "d": "dtype F64 in A, F32 in B",
        "s": "shape [2, 3] in A, [3, 2] in B",
        "tie": "another name of x in A, a tensor of its own in B",
    }
    assert found.values == {"step": (1, 2), "config.lr": (0.1, 0.2)}
    assert not found.is_same


def test_a_state_is_the_same_in_another_layout() -> None:
    store, target = MemoryStore(), MemoryStore()
    make_store(store, llama_state(Layout(2, 2, 2)))
    lineage = Log(store).read()
    a = open_checkpoint(store, find_live(lineage, None, store.url))
    reshard(a, lineage, target, Layout(4, 1, 2, 2), by="a test")
    b = open_checkpoint(target, find_live(Log(target).read(), None, target.url))
    found = diff(a, b)
    assert found.is_same
    assert len(found.not_compared) == 8
    assert not diff(a, stored(llama_state(Layout(2, 2, 2), seed=1))).is_same


def test_values_of_the_layout_count_within_one_layout() -> None:
    a = Content({}, ONE, values={"pipeline": {"stages": [[0]], "virtual": 1}})
    b = Content({}, ONE, values={"pipeline": {"stages": [[0]], "virtual": 2}})
    assert diff(stored(a), stored(b)).values == {"pipeline.virtual": (1, 2)}


def test_bool_elements_that_are_not_0_or_1_keep_their_bits() -> None:
    a = np.array([1, 2, 0], np.uint8).view(NUMPY_DTYPES["BOOL"])
    b = np.array([1, 1, 0], np.uint8).view(NUMPY_DTYPES["BOOL"])
    assert compared(a, a.copy()).is_same
    assert compared(a, b).differing[0].differing == 1

"""The data order: a permutation of each epoch, one integer of cursor, independent of the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.trainer.order import Order, permute, share, take


@settings(deadline=None, derandomize=True, max_examples=60)
@given(size=st.integers(1, 5000), seed=st.integers(0, (1 << 63) - 1), epoch=st.integers(0, 1 << 40))
def test_every_epoch_visits_each_window_exactly_once(size: int, seed: int, epoch: int) -> None:
    visited = permute(size, seed, epoch, np.arange(size))
    assert np.array_equal(np.sort(visited), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097])
def test_sizes_around_the_powers_of_four_are_permuted_too(size: int) -> None:
    assert np.array_equal(np.sort(permute(size, 7, 1, np.arange(size))), np.arange(size))


def test_a_size_beyond_memory_answers_single_indices() -> None:
    size = (1 << 62) + 12345
    index = np.array([0, 1, size - 1])
    found = permute(size, 1, 0, index)
    assert len(set(found.tolist())) == 3
    assert ((found >= 0) & (found < size)).all()


def test_the_order_of_a_seed_never_changes_between_versions() -> None:
    """A resumed run relies on it: these numbers may not change."""
    order = Order(epoch_size=1000, seed=42)
    assert order.windows(np.array([0, 1, 2, 999, 1000, 1001, 123_456])).tolist() == PINNED


PINNED = [660, 670, 734, 633, 989, 667, 2]


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    size = 10_000
    orders = [permute(size, seed, epoch, np.arange(size)) for seed in (0, 1) for epoch in (0, 1, 2)]
    for a in range(len(orders)):
        for b in range(a):
            agreeing = int((orders[a] == orders[b]).sum())
            assert agreeing < 12, (a, b)  # expected 1, Poisson


def test_an_order_looks_random() -> None:
    """Ranks of neighbours are uncorrelated, and no part of the epoch draws from one part of it."""
    size = 20_000
    order = permute(size, 3, 0, np.arange(size)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    counts = np.histogram2d(np.arange(size), order, bins=10)[0]
    chi2 = float(((counts - size / 100) ** 2 / (size / 100)).sum())
    assert 40 < chi2 < 140  # 81 degrees of freedom


def test_indices_outside_the_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="outside an epoch of 5"):
        permute(5, 0, 0, np.array([5]))
    with pytest.raises(ValueError, match="0 samples"):
        permute(0, 0, 0, np.array([], dtype=np.int64))


def test_a_batch_may_span_two_epochs_and_each_epoch_is_still_whole() -> None:
    order = Order(epoch_size=10, seed=5)
    seen: list[int] = []
    cursor = 0
    for _ in range(10):
        indices, cursor = take(cursor, 3)
        seen += order.windows(indices).tolist()
    assert cursor == 30
    for epoch in range(3):
        assert sorted(seen[epoch * 10 : epoch * 10 + 10]) == list(range(10))
    assert seen[:10] != seen[10:20]  # a resumed epoch is not epoch 0 again


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    skipped=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1])),
        max_size=4,
    ),
)
def test_every_index_is_taken_once_or_is_in_the_skip_list(
    counts: list[int], skipped: list[tuple[int, int]]
) -> None:
    cursor, taken = 0, []
    for count in counts:
        before = cursor
        indices, cursor = take(cursor, count, tuple(skipped))
        assert indices.size == count
        assert before <= indices[0]
        assert cursor == indices[-1] + 1
        taken += indices.tolist()
    gone = {index for first, end in skipped for index in range(first, end)}
    assert taken == [index for index in range(cursor) if index not in gone]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 12])
def test_the_shares_of_any_dp_are_the_same_samples(dp: int) -> None:
    indices, _ = take(5, 12)
    shares = [share(indices, dp, rank) for rank in range(dp)]
    assert np.array_equal(np.concatenate(shares), indices)


def test_an_unequal_share_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"12 samples .* dp=5"):
        share(take(0, 12)[0], 5, 0)

"""Whether copies overlap: the cheaper way by measured steps, tried in fair turns."""

from __future__ import annotations

import itertools

import pytest

from keepstep.ckpt.overlap import BLOCK, PAIRS, WARM_UP, OverlapChoice


def _fed(
    overlapped_ms: float, blocked_ms: float, drift_ms: float = 0.0
) -> tuple[OverlapChoice, list[bool]]:
    choice, ways = OverlapChoice(), []
    for number in itertools.count():
        if choice.is_settled:
            return choice, ways
        ways.append(choice.is_overlapped)
        slow = 900.0 if number < WARM_UP else 0.0
        step_ms = overlapped_ms if choice.is_overlapped else blocked_ms
        choice.add(step_ms + slow + number * drift_ms)
    raise AssertionError


def test_both_ways_have_as_many_turns_and_the_order_is_mirrored() -> None:
    _, ways = _fed(10.0, 12.0)
    counted = ways[WARM_UP:]
    assert len(counted) == 2 * BLOCK * PAIRS
    turns = [way for way, _ in itertools.groupby(counted)]
    assert counted.count(True) == counted.count(False)
    assert turns[:3] == [True, False, True]


@pytest.mark.parametrize(
    ("overlapped_ms", "blocked_ms", "is_overlapped"),
    [(10.0, 12.0, True), (10.0, 9.9, True), (10.0, 10.0, True), (40.0, 12.0, False)],
)
def test_the_cheaper_way_stays_and_a_tie_is_overlap(
    overlapped_ms: float, blocked_ms: float, is_overlapped: bool
) -> None:
    choice, _ = _fed(overlapped_ms, blocked_ms)
    assert choice.is_overlapped is is_overlapped
    assert f"{overlapped_ms:.2f} ms with overlap and {blocked_ms:.2f} ms" in choice.words
    words = choice.words
    choice.add(1e6)
    assert (choice.is_overlapped, choice.words) == (is_overlapped, words)


@pytest.mark.parametrize("drift_ms", [-0.2, 0.2])
def test_a_drift_of_the_steps_time_does_not_decide(drift_ms: float) -> None:
    assert _fed(10.0, 10.0, drift_ms)[0].is_overlapped
    assert not _fed(40.0, 30.0, drift_ms)[0].is_overlapped

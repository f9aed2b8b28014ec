"""A throttle widens the gap between requests while it is told to, and closes it again."""

from __future__ import annotations

import pytest

from keepstep.storage.throttle import GAP_FIRST_S, GAP_MAX_S, Throttle


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nobody_waits_before_the_store_complains() -> None:
    throttle = Throttle(Clock())
    assert [throttle.take_turn() for _ in range(10)] == [0.0] * 10


def test_after_a_complaint_each_request_has_its_own_turn() -> None:
    throttle = Throttle(Clock())
    throttle.refused()
    turns = [throttle.take_turn() for _ in range(3)]
    assert turns == pytest.approx([GAP_FIRST_S, 2 * GAP_FIRST_S, 3 * GAP_FIRST_S])


def test_complaints_double_the_gap_up_to_a_bound() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    gaps = []
    for _ in range(12):
        throttle.refused()
        gaps.append(throttle.gap_s)
        clock.now_s += 10
    assert gaps[:3] == pytest.approx([GAP_FIRST_S, 2 * GAP_FIRST_S, 4 * GAP_FIRST_S])
    assert gaps[-1] == GAP_MAX_S


def test_complaints_about_requests_under_way_together_count_once() -> None:
    throttle = Throttle(Clock())
    for _ in range(8):
        throttle.refused()
    assert throttle.gap_s == GAP_FIRST_S


def test_success_closes_the_gap_step_by_step() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    for _ in range(4):
        throttle.refused()
        clock.now_s += 10
    widest_s = throttle.gap_s
    throttle.accepted()
    assert 0 < throttle.gap_s < widest_s
    for _ in range(20):
        throttle.accepted()
    assert throttle.gap_s == 0.0

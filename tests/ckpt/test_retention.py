"""Which commits retention lets go: by example, and the promises as properties."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.ckpt.manifest import State
from keepstep.ckpt.retention import Policy, to_retire


def states(*steps: int) -> list[State]:
    return [State(generation=1, step=step) for step in steps]


def going(steps: list[int], keep_last: int, keep_every: int = 0, *protect: int) -> list[int]:
    policy = Policy(keep_last=keep_last, keep_every=keep_every)
    return [state.step for state in to_retire(states(*steps), policy, states(*protect))]


def test_the_default_keeps_the_last_five() -> None:
    gone = to_retire(states(*range(10, 90, 10)), Policy())
    assert [state.step for state in gone] == [10, 20, 30]


def test_keep_last_0_keeps_all() -> None:
    assert going([10, 20, 30], keep_last=0) == []
    assert going([10, 20, 30], keep_last=0, keep_every=20) == []


def test_milestones_stay() -> None:
    assert going([50, 100, 150, 200, 250], 1, 100) == [50, 150]


def test_a_milestone_is_the_first_commit_at_or_after_its_multiple() -> None:
    """A run that was stopped, and commits at other steps since, does not lose its milestones."""
    assert going([90, 107, 157, 207, 257, 307], 1, 100) == [90, 157, 257]


def test_what_is_protected_stays() -> None:
    assert going([10, 20, 30], 1, 0, 10) == [20]


def test_order_of_the_input_does_not_matter() -> None:
    assert going([30, 10, 20], 1) == [10, 20]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(-1, 0), (1, -5)])
def test_negative_numbers_are_refused_by_name(keep_last: int, keep_every: int) -> None:
    with pytest.raises(ValueError, match=r"keep_(last|every) must be 0 or more, not -[15]"):
        Policy(keep_last=keep_last, keep_every=keep_every)


@given(
    st.sets(st.integers(0, 60)),
    st.integers(0, 5),
    st.integers(0, 10),
    st.sets(st.integers(0, 60)),
)
@settings(max_examples=400, derandomize=True, deadline=None)
def test_the_last_one_never_goes_and_a_second_call_finds_nothing(
    steps: set[int], keep_last: int, keep_every: int, protect: set[int]
) -> None:
    gone = going(sorted(steps), keep_last, keep_every, *protect)
    left = steps - set(gone)
    assert set(gone) <= steps
    assert not set(gone) & protect
    assert not steps or max(steps) in left
    assert len(left) >= min(keep_last, len(steps))
    assert going(sorted(left), keep_last, keep_every, *protect) == []

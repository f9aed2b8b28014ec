"""Which image goes next: superseding, what others have begun, and how far slots are free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.ckpt.drain_queue import DrainQueue, SlotNeeds, Ticket
from keepstep.ckpt.manifest import State


def ticket(step: int, rank: int = 0) -> Ticket:
    return Ticket(State(1, step), rank)


def test_one_state_at_a_time_and_all_its_images_at_once() -> None:
    queue = DrainQueue()
    for rank in range(3):
        queue.add(ticket(10, rank))
    assert queue.take()[0] == ticket(10, 0)
    queue.add(ticket(20, 0))
    assert [queue.take()[0] for _ in range(3)] == [ticket(10, 1), ticket(10, 2), None]
    assert not queue.has_next()
    for rank in range(3):
        queue.finish(ticket(10, rank))
    assert queue.take() == (ticket(20, 0), [])


def test_a_newer_state_supersedes_those_that_have_not_begun() -> None:
    queue = DrainQueue()
    for step in (10, 20, 30):
        queue.add(ticket(step, 0))
        queue.add(ticket(step, 1))
    taken, dropped = queue.take()
    assert taken == ticket(30, 0)
    assert dropped == [ticket(10, 0), ticket(10, 1), ticket(20, 0), ticket(20, 1)]
    assert queue.take() == (ticket(30, 1), [])


def test_a_state_that_was_begun_is_never_superseded() -> None:
    queue = DrainQueue()
    queue.add(ticket(10, 0))
    queue.take()
    queue.finish(ticket(10, 0))
    queue.add(ticket(20, 0))
    queue.add(ticket(10, 1))  # sealed late
    assert queue.take() == (ticket(10, 1), [])


def test_a_state_whose_only_try_failed_may_be_superseded() -> None:
    queue = DrainQueue()
    queue.add(ticket(10))
    queue.take()
    queue.again(ticket(10))
    queue.add(ticket(20))
    assert queue.take() == (ticket(20), [ticket(10)])


def test_among_several_hosts_the_roundest_step_is_begun() -> None:
    queue = DrainQueue()
    queue.is_alone = False
    for step in (60, 80, 100):
        queue.add(ticket(step))
    assert queue.take() == (ticket(80), [ticket(60)])
    assert queue.tickets() == [ticket(80), ticket(100)]


def test_when_too_many_wait_the_least_wanted_goes() -> None:
    queue = DrainQueue(waiting_max=2)
    assert queue.add(ticket(80, 0)) + queue.add(ticket(80, 1)) + queue.add(ticket(90)) == []
    assert queue.add(ticket(100)) == [ticket(80, 0), ticket(80, 1)]
    queue.is_alone = False
    assert queue.add(ticket(110)) == [ticket(90)], "100 is rounder, and 110 the newest"


def test_what_is_dropped_waits_no_more_and_what_runs_goes_on() -> None:
    queue = DrainQueue()
    queue.add(ticket(10, 0))
    queue.add(ticket(10, 1))
    queue.take()
    queue.add(ticket(20))
    assert queue.drop(lambda state: state.step == 10) == [ticket(10, 1)]
    assert queue.tickets() == [ticket(10, 0), ticket(20, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_hosts_of_any_speed_finish_the_same_states(seed: int) -> None:
    """Due states come faster than some hosts take them: of what the slowest can do, most counts."""
    drawn = random.Random(seed)
    durations = [drawn.randint(1, 60) for _ in range(drawn.randint(2, 6))]
    lateness = [drawn.randint(0, 4) for _ in durations]
    queues = [DrainQueue() for _ in durations]
    done: list[set[State]] = [set() for _ in durations]
    running: list[tuple[Ticket, int] | None] = [None for _ in durations]
    for now in range(3_000):
        for host, queue in enumerate(queues):
            queue.is_alone = False
            if now % 5 == lateness[host]:
                queue.add(ticket(now // 5 * 10))
            going = running[host]
            if going is not None and going[1] <= now:
                queue.finish(going[0])
                done[host].add(going[0].state)
                running[host] = going = None
            if going is None:
                taken, _ = queue.take()
                if taken is not None:
                    running[host] = taken, now + durations[host]
    assert len(set.intersection(*done)) >= 0.6 * 3_000 / max(durations)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_a_level_has_no_needed_step_at_or_below_it(events: list[tuple[bool, int]]) -> None:
    needs = SlotNeeds()
    needed: set[int] = set()
    for is_need, step in events:
        before = needs.level
        if is_need and step > max(needed | {before}, default=-1):
            needs.need(step)
            needed.add(step)
        elif step in needed:
            risen = needs.release(step)
            needed.discard(step)
            assert risen == (needs.level > before)
        assert all(each > needs.level for each in needed)
        assert needs.level >= before


def test_a_level_waits_for_the_oldest() -> None:
    needs = SlotNeeds()
    needs.need(10)
    needs.need(20)
    assert not needs.release(20)
    assert needs.level == -1
    assert needs.release(10)
    assert needs.level == 20

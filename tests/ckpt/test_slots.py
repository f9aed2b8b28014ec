"""The rule of slots: against a second one that knows nothing but its history, and in a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.ckpt.slots import LEVEL_ALL, OWNS_NOTHING, Decision, Level, SlotRule, agree
from keepstep.ckpt.tiers import Due

NOWHERE, DISK, STORE = Due.NOWHERE, Due.DISK, Due.STORE


def level(acked: int = -1, drained: int = -1, lost: int = -1) -> Level:
    return Level(acked, drained, lost)


def positions(rule: SlotRule, steps: range, agreed: Level) -> list[int | None]:
    return [rule.decide(step, NOWHERE, agreed).position for step in steps]


def test_slots_are_filled_in_order_and_then_nothing_is_captured_before_an_acknowledgement() -> None:
    assert positions(SlotRule(3, False), range(1, 6), level()) == [0, 1, 2, None, None]


def test_the_oldest_slot_is_reused_once_a_newer_step_is_acknowledged_on_all_ranks() -> None:
    rule = SlotRule(3, False)
    positions(rule, range(1, 4), level())
    assert rule.decide(4, NOWHERE, level(acked=1)).position is None
    assert rule.decide(5, NOWHERE, level(acked=2)).position == 0
    assert rule.decide(6, NOWHERE, level(acked=2)).position is None
    assert rule.decide(7, NOWHERE, level(acked=5)).position == 1


def test_two_slots_alternate() -> None:
    rule = SlotRule(2, False)
    got = [rule.decide(step, NOWHERE, level(acked=step - 1)).position for step in range(1, 7)]
    assert got == [0, 1, 0, 1, 0, 1]


def test_one_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        SlotRule(1, False)


def test_only_the_first_slot_is_used_until_the_first_step_is_acknowledged() -> None:
    rule = SlotRule(3, True)
    assert positions(rule, range(11, 14), level()) == [0, None, None]
    assert rule.decide(14, NOWHERE, level(acked=11)).position == 1
    assert rule.decide(15, NOWHERE, level(acked=11)).position == 2
    assert rule.decide(16, NOWHERE, level(acked=11)).position is None


def test_a_first_step_that_some_rank_lost_makes_room_for_the_next() -> None:
    rule = SlotRule(3, True)
    assert rule.decide(1, NOWHERE, level()).position == 0
    assert rule.decide(2, NOWHERE, level(lost=1)).position == 0
    assert rule.decide(3, NOWHERE, level(acked=2, lost=1)).position == 1


def test_a_step_that_some_rank_lost_lets_no_older_one_go() -> None:
    rule = SlotRule(3, False)
    positions(rule, range(1, 4), level())
    # Ranks that have step 2 say 2; one that lost it says 3 already.
    agreed = agree([level(acked=2), level(acked=3, lost=2)])
    assert agreed == level(acked=2, lost=2)
    assert rule.decide(4, NOWHERE, agreed).position == 1  # the lost one's, not that of step 1
    assert rule.captured == [1, 4, 3]


def test_a_due_step_keeps_its_slot_until_it_is_drained_everywhere() -> None:
    rule = SlotRule(3, False)
    assert rule.decide(1, STORE, level()) == Decision(0, STORE, NOWHERE, "")
    assert rule.decide(2, NOWHERE, level(acked=1)).position == 1
    assert rule.decide(3, NOWHERE, level(acked=2)).position == 2
    assert rule.decide(4, NOWHERE, level(acked=3)).position == 1
    assert rule.decide(5, NOWHERE, level(acked=4, drained=1)).position == 0
    assert rule.pending == -1


def test_a_mark_that_comes_while_another_is_pending_goes_to_a_later_state() -> None:
    rule = SlotRule(3, False)
    rule.decide(1, DISK, level())
    second = rule.decide(2, STORE, level(acked=1))
    assert (second.position, second.due, second.put_off) == (1, NOWHERE, STORE)
    assert "due step 1" in second.reason
    third = rule.decide(3, DISK, level(acked=2, drained=1))
    assert (third.due, third.put_off, third.reason) == (DISK | STORE, NOWHERE, "")
    assert (rule.pending, rule.owed) == (3, NOWHERE)


def test_the_mark_of_a_skipped_capture_goes_to_the_next() -> None:
    rule = SlotRule(2, False)
    positions(rule, range(1, 3), level())
    skipped = rule.decide(3, STORE, level())
    assert skipped.is_skipped
    assert (skipped.due, skipped.put_off) == (NOWHERE, STORE)
    assert "holding steps 1, 2; acknowledged on all ranks -1" in skipped.reason
    assert rule.decide(3, NOWHERE, level(acked=2)) == Decision(0, STORE, NOWHERE, "")


def test_a_due_step_that_some_rank_lost_keeps_its_slot_until_the_others_have_drained_it() -> None:
    rule = SlotRule(2, False)
    rule.decide(1, STORE, level())
    assert rule.decide(2, STORE, level(lost=1)) == Decision(
        1, NOWHERE, STORE, "due step 1 is not drained on all ranks yet"
    )
    assert rule.decide(3, NOWHERE, level(lost=1)).is_skipped
    assert rule.decide(3, NOWHERE, level(drained=1, lost=1)) == Decision(0, STORE, NOWHERE, "")


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_does_not_come_after_the_last_is_refused(step: int) -> None:
    rule = SlotRule(3, False)
    rule.decide(5, NOWHERE, level())
    with pytest.raises(ValueError, match="does not come after step 5"):
        rule.decide(step, NOWHERE, level())


def test_a_rank_that_owns_nothing_holds_nobody_up() -> None:
    assert agree([level(7, 5, 2), OWNS_NOTHING]) == level(7, 5, 2)
    assert OWNS_NOTHING.acked == LEVEL_ALL


def test_nothing_agrees_with_nobody() -> None:
    with pytest.raises(ValueError):
        agree([])


@dataclass
class Naive:
    """The rule again, from nothing but what was decided and what was known when."""

    slots: int
    first_alone: bool
    past: list[tuple[int, int | None, Due, Due, Level]] = field(default_factory=list)

    def decide(self, step: int, due: Due, agreed: Level) -> tuple[int | None, Due, Due]:
        known = [*(entry[4] for entry in self.past), agreed]
        taken = [entry for entry in self.past if entry[1] is not None]

        def is_lost(entry: tuple[int, int | None, Due, Due, Level]) -> bool:
            return entry[0] in {one.lost for one in known[self.past.index(entry) + 1 :]}

        def is_safe(one: int, now: Level) -> bool:
            return now.lost < one <= now.acked

        holds: dict[int, int] = {}
        for entry in taken:
            assert entry[1] is not None
            holds[entry[1]] = entry[0]
        lost = {entry[0] for entry in taken if is_lost(entry)}
        safe_once = any(
            is_safe(entry[0], now)
            for index, entry in enumerate(self.past)
            if entry[1] == 0
            for now in known[index + 1 : self._overwritten(index, known)]
        )
        usable = range(self.slots) if safe_once or not self.first_alone else range(1)
        undrained = [
            entry[0]
            for index, entry in enumerate(self.past)
            if entry[2] and all(now.drained < entry[0] for now in known[index + 1 :])
        ]
        holds = {place: one for place, one in holds.items() if one not in lost or one in undrained}
        free = [place for place in usable if place not in holds]
        old = [
            (holds[place], place)
            for place in usable
            if place in holds
            and holds[place] not in undrained
            and any(one > holds[place] and is_safe(one, agreed) for one in holds.values())
        ]
        place = free[0] if free else min(old)[1] if old else None
        owed = self.past[-1][3] if self.past else NOWHERE
        marks = due | owed
        kept = marks if place is not None and not undrained else NOWHERE
        self.past.append((step, place, kept, marks & ~kept, agreed))
        return place, kept, marks & ~kept

    def _overwritten(self, index: int, known: list[Level]) -> int:
        """Until when the first slot held the step of entry `index`."""
        for later in range(index + 1, len(self.past)):
            if self.past[later][1] == 0:
                return later + 1
        return len(known)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_both_rules_decide_alike(data: st.DataObject) -> None:
    slots = data.draw(st.integers(2, 4))
    first_alone = data.draw(st.booleans())
    rule, naive = SlotRule(slots, first_alone), Naive(slots, first_alone)
    acked = drained = lost = -1
    step = data.draw(st.integers(0, 3))
    taken: list[int] = []
    for _ in range(data.draw(st.integers(1, 30))):
        old = step
        step += data.draw(st.integers(1, 3))
        if taken:
            acked = max(acked, data.draw(st.sampled_from([acked, *taken[-4:]])))
            drained = max(drained, data.draw(st.sampled_from([drained, *taken[-4:]])))
            if data.draw(st.integers(0, 5)) == 0:
                lost = max(lost, data.draw(st.sampled_from(taken[-4:])))
        due = data.draw(st.sampled_from([NOWHERE, NOWHERE, DISK, STORE, DISK | STORE]))
        agreed = level(acked, drained, lost)
        got = rule.decide(step, due, agreed)
        assert (got.position, got.due, got.put_off) == naive.decide(step, due, agreed), (old, step)
        assert bool(got.reason) == (got.is_skipped or bool(got.put_off))
        if got.position is not None:
            taken.append(step)


@dataclass
class Rank:
    """A rank of the model: its slots, and how far each of its captures is."""

    rule: SlotRule
    slots: list[int | None]
    queue: list[tuple[int, int, Due]] = field(default_factory=list)
    sealed: set[int] = field(default_factory=set)
    unacked: list[int] = field(default_factory=list)
    undrained: list[int] = field(default_factory=list)
    level: Level = field(default_factory=Level)

    def capture(self, step: int, due: Due, agreed: Level) -> Decision:
        decision = self.rule.decide(step, due, agreed)
        if decision.position is not None:
            old = self.slots[decision.position]
            assert old not in self.undrained, f"step {old} is overwritten before it is drained"
            if old in [one for one, _, _ in self.queue]:
                # Another rank lost it, and this one's keeper has yet to seal it: not to be claimed.
                self.lose(step, decision.due)
                return decision
            self.sealed.discard(-1 if old is None else old)
            self.slots[decision.position] = step
            self.queue.append((step, decision.position, decision.due))
        return decision

    def lose(self, step: int, due: Due) -> None:
        drained = max(self.level.drained, step) if due else self.level.drained
        self.level = Level(self.level.acked, drained, max(self.level.lost, step))

    def copy(self, is_lost: bool) -> None:
        """The oldest copy ends: it is sealed, or it failed."""
        step, position, due = self.queue.pop(0)
        if is_lost:
            self.slots[position] = None
            self.lose(step, due)
            return
        self.sealed.add(step)
        self.unacked.append(step)
        if due:
            self.undrained.append(step)

    def ack(self) -> None:
        step = self.unacked.pop(0)
        self.level = Level(step, self.level.drained, self.level.lost)

    def drain(self) -> None:
        step = self.undrained.pop(0)
        self.level = Level(self.level.acked, max(self.level.drained, step), self.level.lost)


class World:
    """Ranks that are coupled by one reduction a step, and by nothing else; all lateness random."""

    def __init__(self, seed: int, ranks: int, slots: int, delay: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.ranks = [Rank(SlotRule(slots, False), [None] * slots) for _ in range(ranks)]
        self.delay = delay
        self.loss = loss
        self.agreed = [Level()] * (delay + 1)
        self.had_common = False
        self.skipped = 0
        self.dues = 0
        self.ack_chance = self.random.choice([0.02, 0.2, 0.9])
        self.drain_chance = self.random.choice([0.01, 0.1, 0.9])

    def common(self) -> set[int]:
        return set.intersection(*(rank.sealed for rank in self.ranks))

    def check(self) -> None:
        common = self.common()
        assert common or not self.had_common, "no state is left that all ranks have"
        self.had_common = bool(common)

    def tick(self, rank: Rank) -> None:
        """Something of what may happen to a rank happens, and the world may end after it."""
        if rank.queue and self.random.random() < 0.7:
            rank.copy(self.random.random() < self.loss)
        if rank.unacked and self.random.random() < self.ack_chance:
            rank.ack()
        if rank.undrained and self.random.random() < self.drain_chance:
            rank.drain()
        self.check()

    def step(self, step: int) -> None:
        due = STORE if step % 7 == 0 else DISK if step % 3 == 0 else NOWHERE
        self.agreed.append(agree(rank.level for rank in self.ranks))
        agreed = self.agreed[-1 - self.delay]
        decisions = []
        waiting = list(self.ranks)
        self.random.shuffle(waiting)
        while waiting:  # the ranks come here at different times, and much happens in between
            rank = waiting.pop()
            decisions.append(rank.capture(step, due, agreed))
            self.check()
            for _ in range(self.random.randrange(4)):
                self.tick(self.random.choice(self.ranks))
        assert all(decision == decisions[0] for decision in decisions)
        self.skipped += decisions[0].is_skipped
        self.dues += bool(decisions[0].due)
        # The update guard: no rank's next step comes before its copy is done.
        for rank in self.ranks:
            while len(rank.queue) > 1:
                rank.copy(self.random.random() < self.loss)
                self.check()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(2, 4),
    delay=st.integers(0, 1),
    loss=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
)
def test_a_state_that_all_ranks_have_is_always_there_once_there_was_one(
    seed: int, slots: int, delay: int, loss: float
) -> None:
    world = World(seed, 8, slots, delay, loss)
    for step in range(1, 80):
        world.step(step)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_captures_and_dues_go_on_for_as_long_as_acknowledgements_come(
    delay: int, loss: float
) -> None:
    world = World(5, 8, 3, delay, loss)
    world.ack_chance = world.drain_chance = 0.5
    for step in range(1, 1000):
        world.step(step)
    assert world.skipped < 850  # they come late: eight ranks at random, and the slowest counts
    assert world.dues > 50


def test_with_three_slots_acknowledgements_one_step_late_skip_nothing() -> None:
    rule = SlotRule(3, False)
    decisions = [rule.decide(step, NOWHERE, level(acked=step - 2)) for step in range(1, 50)]
    assert not any(decision.is_skipped for decision in decisions)

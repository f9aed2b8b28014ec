"""Levels in two words: what all ranks learn is what `slots.agree` says, a call later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.ranks import run_ranks

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.level_exchange import LevelExchange, Said, decode, encode
from keepstep.ckpt.slots import LEVEL_ALL, OWNS_NOTHING, Level, agree
from keepstep.ckpt.tiers import Due

BASE = 100
STEPS = st.sampled_from([-1, *range(101, 112)])
SAIDS = st.builds(
    Said,
    level=st.one_of(st.just(OWNS_NOTHING), st.builds(Level, STEPS, STEPS, st.just(-1))),
    overdue=st.sampled_from(list(map(Due, range(4)))),
)


def _together(said: list[Said], lost_told: int = -1) -> tuple[int, int]:
    words = [encode(one, lost_told, BASE) for one in said]
    return min(first for first, _ in words), min(second for _, second in words)


@given(st.lists(SAIDS, min_size=1, max_size=5))
def test_the_smallest_words_are_the_agreed_level(said: list[Said]) -> None:
    found = decode(_together(said), Level(), BASE)
    wanted = agree(one.level for one in said)
    assert found.level == wanted
    assert not found.wants_plan
    slowest = [one.overdue for one in said if one.level.drained == wanted.drained]
    if wanted.drained != LEVEL_ALL:
        assert found.overdue == min(slowest, key=int)


@given(st.lists(SAIDS, min_size=1, max_size=5), st.integers(101, 111))
def test_a_loss_passes_before_and_changes_nothing_else(said: list[Said], lost: int) -> None:
    loser = Said(Level(acked=105, drained=105, lost=lost))
    before = Level(acked=104, drained=-1, lost=-1)
    found = decode(_together([*said, loser]), before, BASE)
    assert found.level.lost == lost
    assert found.level.acked == 104
    assert encode(loser, lost, BASE)[0] == 5  # told once


@given(st.lists(SAIDS, min_size=1, max_size=5))
def test_the_wish_for_a_new_plan_passes_before_a_loss(said: list[Said]) -> None:
    words = _together([*said, Said(Level(lost=111)), Said(Level(), wants_plan=True)])
    found = decode(words, Level(103, 102, 101), BASE)
    assert found.wants_plan
    assert (found.level.acked, found.level.lost) == (103, 101)


@given(st.lists(SAIDS, min_size=2, max_size=6))
def test_what_is_known_never_goes_back(said: list[Said]) -> None:
    level = Level()
    for one in said:
        after = decode(encode(one, level.lost, BASE), level, BASE).level
        assert after.acked >= level.acked
        assert after.drained >= level.drained
        level = after


def test_the_base_may_be_nothing_and_steps_have_an_end() -> None:
    assert decode(encode(Said(Level(0, 0)), -1, -1), Level(), -1).level == Level(0, 0)
    with pytest.raises(CheckpointError, match="begin anew"):
        encode(Said(Level(acked=2**28 + 1)), -1, 0)


def test_alone_the_words_of_one_call_are_known_at_the_next() -> None:
    exchange = LevelExchange(None, BASE)
    assert exchange.take() == Said(Level())
    exchange.start(Said(Level(101, -1), Due.DISK))
    assert exchange.take() == Said(Level(101, -1), Due.DISK)
    exchange.start(Said(Level(102, -1, 103)))
    exchange.start(Said(Level(104, -1, 103)))
    assert exchange.take().level == Level(104, -1, 103)


def _exchange(rank: int, world: int) -> list[Said]:
    import torch.distributed as dist

    exchange = LevelExchange(dist.new_group(backend="gloo"), BASE)
    known = []
    for step in range(101, 106):
        known.append(exchange.take())
        lost = 103 if rank == 1 and step >= 103 else -1
        exchange.start(Said(Level(step - rank, step, lost)))
    return [*known, exchange.take()]


@pytest.mark.ranks
def test_all_ranks_know_the_same_at_the_same_call() -> None:
    first, second = run_ranks(2, _exchange)
    assert first == second
    assert [one.level for one in first] == [
        Level(-1, -1, -1),
        Level(-1, 101, -1),
        Level(101, 102, -1),
        Level(101, 103, 103),
        Level(103, 104, 103),
        Level(104, 105, 103),
    ]

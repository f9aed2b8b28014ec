"""What a keeper decides: the fence, the pins, whose slot is whose, and when it ends."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.keepers import header_of, make_structure

from keepstep.ckpt.control import Enter
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_core import (
    OVERSIZE,
    PINNED_STATES_MAX,
    Promise,
    Row,
    check_enter,
    check_fence,
    choose_own,
    choose_peer,
    peer_slots_missing,
    pinned_states,
    promised,
    rows_to_free,
    rows_to_seal,
    surplus_rows,
    void_rows,
    why_end,
)
from keepstep.ckpt.keeper_errors import NoRoom, Refusal, Stale
from keepstep.ckpt.manifest import GENERATION_MAX, State
from keepstep.ckpt.pool_table import SlotStatus, Writer
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Tiers

MIB = 1 << 20
KEEPER = Writer(1, 1)
ALIVE = Writer(10, 5)
DEAD = Writer(20, 7)
LIVING = frozenset((KEEPER, ALIVE))
STRUCTURE = make_structure(2, 1 << 16)
ADDRESSES = (HostAddress("h0", "", "a:1"), HostAddress("h1", "", "b:1"))
FREE, FILLING, CAPTURED, SEALED = (
    SlotStatus.FREE,
    SlotStatus.FILLING,
    SlotStatus.CAPTURED,
    SlotStatus.SEALED,
)


def enter_of(**changes: object) -> Enter:
    enter = Enter(
        generation=3,
        term=5,
        rank=0,
        ranks=(0,),
        hosts=(0, 1),
        addresses=ADDRESSES,
        committer=1,
        base=State(2, 40),
        structure=STRUCTURE,
        header=header_of(STRUCTURE, 0).encoded,
        image_bytes_max=MIB,
    )
    return msgspec.structs.replace(enter, **changes)


def tenure_of(generation: int = 3, base: State | None = None) -> Tenure:
    return Tenure(
        job="demo",
        host="h0",
        generation=generation,
        term=5,
        ranks=(0,),
        hosts=(0, 1),
        addresses=ADDRESSES,
        committer=1,
        base=base,
        structure=STRUCTURE,
        tiers=Tiers(),
    )


def row(
    index: int,
    status: SlotStatus = SEALED,
    state: State | None = None,
    *,
    rank: int = 0,
    is_own: bool = True,
    writer: Writer = DEAD,
    owner: Writer | None = None,
    capacity_bytes: int = MIB,
    is_held: bool = False,
) -> Row:
    state = state or State(2, 40)
    return Row(index, status, state, rank, is_own, writer, owner, capacity_bytes, is_held=is_held)


@pytest.mark.parametrize(
    ("asked", "is_stale"),
    [
        ((4, 7), False),
        ((5, 7), False),
        ((4, 8), False),
        ((3, 7), True),
        ((4, 6), True),
        ((3, 9), True),
        ((9, 6), True),
    ],
)
def test_an_older_generation_or_term_is_stale(asked: tuple[int, int], is_stale: bool) -> None:
    if is_stale:
        with pytest.raises(Stale, match="a newer run has taken over") as caught:
            check_fence(Promise(4, 7), *asked, "rank 3")
        assert (caught.value.generation, caught.value.term) == (4, 7)
    else:
        check_fence(Promise(4, 7), *asked, "rank 3")


@given(st.lists(st.tuples(st.integers(-5, 30), st.integers(-5, 30)), max_size=30))
def test_a_promise_never_goes_back(asked: list[tuple[int, int]]) -> None:
    promise = Promise()
    for generation, term in asked:
        before = promise
        try:
            promise = promised(promise, generation, term, "x")
        except Stale:
            assert generation < before.generation or term < before.term
        assert promise.generation >= before.generation
        assert promise.term >= before.term


def test_a_promise_to_a_generation_that_cannot_be_is_refused() -> None:
    with pytest.raises(Refusal, match="beyond any that can be"):
        promised(Promise(), GENERATION_MAX + 1, 1, "x")


def test_the_first_rank_begins_a_tenure_and_the_others_join_it() -> None:
    assert check_enter(None, enter_of(), "h0")
    assert check_enter(tenure_of(2), enter_of(), "h0")
    assert not check_enter(tenure_of(base=State(2, 40)), enter_of(), "h0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": (0,)}, "the mesh has 2 ranks"),
        ({"hosts": (0, 2)}, "expected indices of 2 hosts"),
        ({"committer": -1}, "expected indices of 2 hosts"),
        ({"ranks": (0, 1)}, r"host h0 has ranks \(0,\)"),
        ({"rank": 1}, r"host h0 has ranks \(0,\)"),
        ({"image_bytes_max": 0}, "cannot have 0 bytes"),
        ({"image_bytes_max": -1, "header": b""}, "cannot have -1 bytes"),
    ],
)
def test_an_enter_that_contradicts_itself_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(Refusal, match=words):
        check_enter(None, enter_of(**changes), "h0")


@pytest.mark.parametrize(
    "changes",
    [
        {"term": 6},
        {"addresses": (ADDRESSES[0], HostAddress("h1", "", "c:9"))},
        {"committer": 0},
        {"base": None},
        {"structure": make_structure(2, 1 << 17)},
    ],
)
def test_an_enter_that_contradicts_the_first_rank_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(Refusal, match="the rank that came first"):
        check_enter(tenure_of(base=State(2, 40)), enter_of(**changes), "h0")


def test_a_rank_that_has_entered_may_go_on_with_another_structure_and_nothing_else() -> None:
    before, other = tenure_of(base=State(2, 40)), make_structure(2, 1 << 17)
    assert check_enter(before, enter_of(structure=other), "h0", has_entered=True)
    assert not check_enter(before, enter_of(), "h0", has_entered=True)
    with pytest.raises(Refusal, match="term is 6"):
        check_enter(before, enter_of(structure=other, term=6), "h0", has_entered=True)


PRESENT = [State(1, 30), State(2, 38), State(2, 39), State(2, 40), State(2, 41)]


@pytest.mark.parametrize(
    ("promise", "tenure", "is_settled", "slots", "pinned"),
    [
        pytest.param(1, None, False, 3, PRESENT, id="before anybody has entered"),
        pytest.param(3, tenure_of(2), True, 3, PRESENT, id="promised, not entered yet"),
        pytest.param(
            3, tenure_of(3, State(2, 40)), False, 3, PRESENT[2:4], id="base and one below"
        ),
        pytest.param(3, tenure_of(3, State(2, 40)), False, 2, PRESENT[3:4], id="two slots"),
        pytest.param(3, tenure_of(3, State(2, 40)), True, 3, [], id="settled"),
        pytest.param(3, tenure_of(3), False, 3, [], id="from nothing"),
        pytest.param(
            3, tenure_of(3, State(1, 35)), False, 3, PRESENT[:1], id="base is in the store alone"
        ),
    ],
)
def test_what_is_pinned(
    promise: int, tenure: Tenure | None, is_settled: bool, slots: int, pinned: list[State]
) -> None:
    found = pinned_states(PRESENT, Promise(promise, 5), tenure, is_settled, slots)
    assert found == frozenset(pinned)


STATES = st.builds(State, st.integers(1, 4), st.integers(0, 6))


@given(st.sets(STATES), st.none() | STATES, st.booleans(), st.integers(2, 3))
def test_pins_leave_one_slot_to_go_on_with_and_hold_the_base(
    present: set[State], base: State | None, is_settled: bool, slots: int
) -> None:
    tenure = tenure_of(5, base)
    pinned = pinned_states(present, Promise(5, 5), tenure, is_settled, slots)
    assert pinned <= present
    assert len(pinned) < slots
    assert len(pinned) <= PINNED_STATES_MAX
    if base in present and not is_settled:
        assert base in pinned
    assert all(base is not None and state <= base for state in pinned)


def test_what_lies_above_the_base_is_void() -> None:
    rows = [
        row(0, state=State(2, 40)),
        row(1, state=State(2, 41)),
        row(2, state=State(2, 39)),
        row(3, state=State(3, 41)),
        row(4, FREE, State(2, 41)),
        row(5, state=State(1, 50)),
    ]
    assert void_rows(rows, {State(2, 40)}, tenure_of(3, State(2, 40))) == [1, 5]
    assert void_rows(rows, (), tenure_of(3)) == [0, 1, 2, 5]


def test_captured_images_are_sealed_in_order_and_none_below_the_promise() -> None:
    rows = [
        row(0, CAPTURED, State(3, 8)),
        row(1, CAPTURED, State(3, 7), rank=1),
        row(2, CAPTURED, State(3, 7)),
        row(3, CAPTURED, State(2, 9)),
        row(4, SEALED, State(3, 6)),
        row(5, FILLING, State(3, 9)),
        row(6, CAPTURED, State(3, 7), is_own=False),
    ]
    assert [each.index for each in rows_to_seal(rows, Promise(3, 0))] == [2, 1, 0]


@pytest.mark.parametrize(
    ("each", "is_freed"),
    [
        pytest.param(row(0, FILLING, owner=DEAD), True, id="its rank is gone"),
        pytest.param(row(0, FILLING, owner=ALIVE), False, id="its rank lives"),
        pytest.param(
            row(0, FILLING, owner=ALIVE, writer=DEAD), False, id="the fields are an older image's"
        ),
        pytest.param(row(0, FILLING, is_own=False), True, id="an earlier keeper's"),
        pytest.param(row(0, FILLING, is_own=False, writer=KEEPER), False, id="this keeper's"),
        pytest.param(row(0, CAPTURED, State(3, 1)), False, id="to be sealed"),
        pytest.param(row(0, CAPTURED, State(2, 1)), True, id="below the promise"),
        pytest.param(row(0, CAPTURED, State(2, 1), writer=ALIVE), False, id="of a zombie"),
        pytest.param(row(0, SEALED, State(2, 1)), False, id="sealed"),
    ],
)
def test_what_is_freed_after_a_death(each: Row, is_freed: bool) -> None:
    assert (each in rows_to_free([each], Promise(3, 0), LIVING)) == is_freed


def test_a_rank_gets_its_own_old_slots_pinned_ones_besides_one_that_is_ready() -> None:
    rows = [row(index, state=State(2, 38 + index)) for index in range(3)]
    rows += [row(3 + index, state=State(2, 38 + index), rank=1) for index in range(3)]
    pinned = {State(2, 39), State(2, 40)}
    choice = choose_own(rows, pinned, LIVING, 3, 1, MIB, 3)
    assert sorted(choice.slots) == [3, 4, 5]
    assert choice.slots[0] == 3
    assert choice.missing == 0


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(row(0, owner=ALIVE), id="a living rank's"),
        pytest.param(row(0, state=State(3, 1)), id="of this generation"),
        pytest.param(row(0, FILLING), id="filling"),
        pytest.param(row(0, CAPTURED), id="captured"),
        pytest.param(row(0, FREE, capacity_bytes=MIB - 4096), id="too small"),
        pytest.param(row(0, FREE, capacity_bytes=OVERSIZE * MIB + 4096), id="far too large"),
    ],
)
def test_slots_that_no_entering_rank_gets(each: Row) -> None:
    assert choose_own([each], (), LIVING, 3, 0, MIB, 3).slots == ()


CAPACITIES = st.sampled_from((MIB // 2, MIB, 3 * MIB))
ROWS = st.lists(
    st.builds(
        Row,
        index=st.just(0),
        status=st.sampled_from((FREE, FILLING, CAPTURED, SEALED)),
        state=STATES,
        rank=st.integers(0, 3),
        is_own=st.booleans(),
        writer=st.sampled_from((KEEPER, ALIVE, DEAD)),
        owner=st.sampled_from((None, ALIVE, DEAD)),
        capacity_bytes=CAPACITIES,
        is_held=st.booleans(),
    ),
    max_size=12,
).map(lambda rows: [msgspec.structs.replace(each, index=i) for i, each in enumerate(rows)])


def is_untouchable(each: Row, pinned: set[State], generation: int) -> bool:
    """What must not change under anybody's hands."""
    if each.owner == ALIVE or each.status in (FILLING, CAPTURED):
        return True
    if each.status is FREE:
        return False
    return each.state in pinned or each.is_held or each.state.generation >= generation


@given(ROWS, st.sets(STATES, max_size=2), st.integers(0, 3), st.integers(0, 4))
def test_an_entering_rank_can_always_write_one_slot_at_once_and_never_anothers(
    rows: list[Row], pinned: set[State], rank: int, count: int
) -> None:
    choice = choose_own(rows, pinned, LIVING, 4, rank, MIB, count)
    assert len(choice.slots) + choice.missing == count
    assert len(set(choice.slots)) == len(choice.slots)
    chosen = [rows[index] for index in choice.slots]
    for each in chosen:
        assert each.owner != ALIVE
        assert each.status in (FREE, SEALED)
        assert each.capacity_bytes >= MIB
        assert each.status is FREE or each.state.generation < 4
    ready = [each for each in chosen if not is_untouchable(each, pinned, 4)]
    assert ready or choice.missing or not count


@given(ROWS, st.sets(STATES, max_size=2), st.integers(0, 4), CAPACITIES, st.integers(2, 3))
def test_nothing_that_is_needed_is_given_back(
    rows: list[Row], pinned: set[State], ranks: int, size_bytes: int, count: int
) -> None:
    gone = set(surplus_rows(rows, pinned, LIVING, 4, ranks, size_bytes, count))
    assert not any(is_untouchable(rows[index], pinned, 4) for index in gone)
    left = [each for each in rows if each.index not in gone]
    missing_before = peer_slots_missing(rows, pinned, LIVING, 4, ranks, size_bytes, count)
    missing_after = peer_slots_missing(left, pinned, LIVING, 4, ranks, size_bytes, count)
    if all(each.capacity_bytes <= OVERSIZE * size_bytes for each in rows):
        assert missing_after == missing_before


@given(
    ROWS,
    st.sets(STATES, max_size=2),
    STATES,
    st.integers(0, 3),
    st.integers(-1, 6),
    st.integers(2, 3),
)
def test_a_peers_image_never_takes_the_place_of_one_that_is_needed(
    rows: list[Row], pinned: set[State], state: State, rank: int, agreed: int, count: int
) -> None:
    try:
        index = choose_peer(rows, pinned, LIVING, state, rank, MIB, agreed, count)
    except NoRoom:
        return
    each = rows[index]
    assert each.capacity_bytes >= MIB
    assert each.owner != ALIVE
    is_its_older = (
        each.status is SEALED
        and not each.is_own
        and each.rank == rank
        and each.state.generation == state.generation
        and each.state.step < agreed
        and each.state not in pinned
        and not each.is_held
    )
    assert is_its_older or not is_untouchable(each, pinned, state.generation)


def test_a_peers_rank_has_as_many_images_as_there_are_slots_for_it() -> None:
    rows = [row(0, state=State(3, 1), rank=5, is_own=False), row(1, FREE), row(2, FREE)]
    assert choose_peer(rows, (), LIVING, State(3, 2), 5, MIB, -1, 2) in (1, 2)
    rows[1] = row(1, state=State(3, 2), rank=5, is_own=False)
    with pytest.raises(NoRoom, match="it has 2 of 2"):
        choose_peer(rows, (), LIVING, State(3, 3), 5, MIB, 1, 2)
    assert choose_peer(rows, (), LIVING, State(3, 3), 5, MIB, 2, 2) == 0


def test_peers_slots_are_counted_with_pins_but_one_for_each_rank_is_ready() -> None:
    base = State(2, 40)
    rows = [row(index, state=base, is_own=False) for index in range(6)]
    assert peer_slots_missing(rows, {base}, LIVING, 3, 2, MIB, 3) == 2
    assert peer_slots_missing(rows, (), LIVING, 3, 2, MIB, 3) == 0
    assert peer_slots_missing(rows[:3], (), LIVING, 3, 2, MIB, 3) == 3
    assert peer_slots_missing(rows, (), LIVING, 3, 2, 2 * MIB, 3) == 6


@pytest.mark.parametrize(
    ("living", "finished", "alone_s", "words"),
    [
        (1, (0, 1), 99.0, ""),
        (0, (0, 1), 0.0, "all ranks of this host have finished"),
        (0, (0,), 1.9, ""),
        (0, (), 2.0, "no rank has been here for 2.0 s"),
    ],
)
def test_when_a_keeper_ends(
    living: int, finished: tuple[int, ...], alone_s: float, words: str
) -> None:
    found = why_end(living, (0, 1), finished, alone_s, 2.0)
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_a_keeper_that_nobody_entered_is_not_finished() -> None:
    assert why_end(0, (), (), 1.0, 2.0) == ""


def test_a_keeper_whose_ranks_left_no_image_does_not_stay_for_its_patience() -> None:
    assert why_end(0, (0, 1), (), 4.9, 300.0, is_empty=True) == ""
    assert why_end(0, (0, 1), (), 5.0, 300.0, is_empty=True).endswith("have left nothing")
    assert why_end(1, (0, 1), (), 5.0, 300.0, is_empty=True) == ""
    assert why_end(0, (0, 1), (), 5.0, 300.0, is_empty=False) == ""

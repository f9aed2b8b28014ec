"""The table of a pool, on plain memory: words, seats, rows and who may change them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.ckpt.keeper_errors import SlotsTaken, Stale
from keepstep.ckpt.manifest import GENERATION_MAX, STEP_MAX, State
from keepstep.ckpt.pool_errors import PoolDamaged, WrongStatus
from keepstep.ckpt.pool_table import (
    SEATS_MAX,
    SLOTS_MAX,
    TABLE_BYTES,
    VALUES_BYTES,
    Header,
    Owner,
    Seat,
    SlotFacts,
    SlotRow,
    SlotStatus,
    Writer,
)
from keepstep.ckpt.tiers import Due

ME, OTHER = Writer(41, 4100), Writer(42, 4200)
STATE = State(3, 120)
STEP_WORDS = ("lost", "sealed", "acked", "drained", "committed", "agreed_acked", "agreed_drained")


@pytest.fixture
def words() -> memoryview:
    words = memoryview(bytearray(TABLE_BYTES)).cast("Q")
    Header(words).begin()
    return words


@pytest.fixture
def row(words: memoryview) -> SlotRow:
    row = SlotRow(words, 5)
    row.place(TABLE_BYTES, 8192)
    row.present()
    return row


def fill(row: SlotRow, state: State = STATE, writer: Writer = ME) -> None:
    row.claim(writer, 7, state, Due.DISK)
    row.written(5000, 17)


def test_the_last_row_and_the_last_seat_are_inside_the_table(words: memoryview) -> None:
    row, seat = SlotRow(words, SLOTS_MAX - 1), Seat(words, SEATS_MAX - 1)
    row.place(TABLE_BYTES, 4096)
    row.present()
    fill(row)
    seat.take(3, ME, 1)
    seat.skipped = 9
    assert (row.status, seat.rank, seat.skipped) == (SlotStatus.CAPTURED, 3, 9)
    assert Header(words).rows == 0


def test_rows_and_seats_do_not_touch_each_other(words: memoryview) -> None:
    seats = [Seat(words, index) for index in range(SEATS_MAX)]
    for seat in seats:
        seat.take(seat.index, Writer(seat.index + 1, seat.index), 2)
        seat.acked = 100 + seat.index
    rows = [SlotRow(words, index) for index in range(SLOTS_MAX)]
    for row in rows:
        row.place(TABLE_BYTES + row.index * 8192, 8192)
        row.present()
        row.assign(Writer(row.index + 1, 1), row.index)
        row.claim(Writer(row.index + 1, 1), row.index, State(1, row.index), Due.NOWHERE)
    assert [seat.rank for seat in seats] == list(range(SEATS_MAX))
    assert [seat.acked for seat in seats] == list(range(100, 100 + SEATS_MAX))
    assert [row.state.step for row in rows] == list(range(SLOTS_MAX))
    assert [row.owner for row in rows] == [Owner(Writer(n + 1, 1), n) for n in range(SLOTS_MAX)]
    Header(words).check("here")


def test_a_table_of_zeros_is_no_pool() -> None:
    with pytest.raises(PoolDamaged, match="here is not a pool"):
        Header(memoryview(bytearray(TABLE_BYTES)).cast("Q")).check("here")


def test_a_table_with_too_many_rows_is_damaged(words: memoryview) -> None:
    Header(words).rows = SLOTS_MAX + 1
    with pytest.raises(PoolDamaged, match="1025 rows"):
        Header(words).check("here")


@pytest.mark.parametrize("name", STEP_WORDS)
def test_a_step_word_is_minus_one_at_the_beginning(words: memoryview, name: str) -> None:
    seat = Seat(words, 1)
    seat.take(0, ME, 1)
    assert getattr(seat, name) == -1
    for step in (0, STEP_MAX, -1):
        setattr(seat, name, step)
        assert getattr(seat, name) == step


def test_taking_a_seat_forgets_who_sat_there(words: memoryview) -> None:
    seat = Seat(words, 1)
    seat.take(4, ME, 1)
    seat.acked, seat.failures, seat.agreed_drained = 5, 6, 7
    seat.leave()
    assert not seat.is_taken
    seat.take(0, OTHER, 2)
    assert (seat.rank, seat.writer, seat.generation) == (0, OTHER, 2)
    assert (seat.acked, seat.failures, seat.agreed_drained) == (-1, 0, -1)


def test_a_slot_goes_from_free_to_sealed(row: SlotRow) -> None:
    assert (row.status, row.image_offset_bytes) == (SlotStatus.FREE, TABLE_BYTES + VALUES_BYTES)
    row.claim(ME, 7, STATE, Due.DISK | Due.STORE)
    assert row.status is SlotStatus.FILLING
    assert (row.state, row.rank, row.writer, row.is_own, row.size_bytes) == (STATE, 7, ME, True, 0)
    row.written(5000, 17)
    assert row.status is SlotStatus.CAPTURED
    row.sealed()
    assert row.read() == SlotFacts(
        SlotStatus.SEALED, 4, STATE, 7, True, ME, 5000, 17, Due.DISK | Due.STORE
    )


def test_a_sealed_slot_is_claimed_for_a_newer_state(row: SlotRow) -> None:
    fill(row)
    row.sealed()
    old = row.read()
    row.claim(OTHER, 2, State(3, 121), Due.NOWHERE, is_own=False)
    assert not row.is_still(old)
    facts = row.read()
    assert (facts.state.step, facts.rank, facts.is_own, facts.size_bytes) == (121, 2, False, 0)


def test_a_slot_that_is_still_what_it_was(row: SlotRow) -> None:
    fill(row)
    facts = row.read()
    row.set_due(Due.STORE)
    row.pin()
    assert row.is_still(facts)
    row.sealed()
    assert not row.is_still(facts)


WRONG = {
    "claim": (SlotStatus.ABSENT, SlotStatus.FILLING, SlotStatus.CAPTURED),
    "written": (SlotStatus.ABSENT, SlotStatus.FREE, SlotStatus.CAPTURED, SlotStatus.SEALED),
    "sealed": (SlotStatus.ABSENT, SlotStatus.FREE, SlotStatus.FILLING, SlotStatus.SEALED),
    "free": (SlotStatus.ABSENT,),
    "present": (SlotStatus.FREE, SlotStatus.FILLING, SlotStatus.CAPTURED, SlotStatus.SEALED),
    "place": (SlotStatus.FREE, SlotStatus.FILLING, SlotStatus.CAPTURED, SlotStatus.SEALED),
}


@pytest.mark.parametrize(
    ("call", "status"), [(call, status) for call, them in WRONG.items() for status in them]
)
def test_a_change_from_another_status_is_refused(
    row: SlotRow, call: str, status: SlotStatus
) -> None:
    if status is SlotStatus.ABSENT:
        row.absent()
    if status >= SlotStatus.FILLING:
        row.claim(ME, 7, STATE, Due.DISK)
    if status >= SlotStatus.CAPTURED:
        row.written(5000, 17)
    if status >= SlotStatus.SEALED:
        row.sealed()
    before = row.read()
    calls = {
        "claim": lambda: row.claim(OTHER, 1, State(9, 9), Due.STORE),
        "written": lambda: row.written(1, 1),
        "sealed": row.sealed,
        "free": row.free,
        "present": row.present,
        "place": lambda: row.place(0, 0),
    }
    with pytest.raises(WrongStatus, match=rf"slot 5 .* found {status.name}"):
        calls[call]()
    assert row.read() == before


def test_a_claim_below_the_fence_changes_nothing(words: memoryview, row: SlotRow) -> None:
    fill(row)
    row.sealed()
    row.pin()
    before = row.read()
    header = Header(words)
    header.raise_fence(4)
    header.raise_fence(2)
    assert header.fence == 4
    with pytest.raises(Stale, match=r"step 121 of generation 3: .*promised generation 4") as caught:
        row.claim(ME, 7, State(3, 121), Due.NOWHERE)
    assert caught.value.generation == 4
    assert (row.read(), row.pinned) == (before, True)
    row.claim(ME, 7, State(4, 121), Due.NOWHERE)
    assert not row.pinned


def test_only_the_owner_claims_an_assigned_slot(row: SlotRow) -> None:
    row.assign(ME, 7)
    with pytest.raises(SlotsTaken, match=r"belongs to pid 41 \(rank 7\)") as caught:
        row.claim(OTHER, 7, STATE, Due.NOWHERE)
    assert caught.value.pid == 41
    assert row.status is SlotStatus.FREE
    with pytest.raises(SlotsTaken):
        row.claim(Writer(ME.pid, ME.ticks + 1), 7, STATE, Due.NOWHERE)
    row.assign(OTHER, 8)
    row.claim(OTHER, 8, STATE, Due.NOWHERE)


def test_freeing_unpins_and_leaves_the_owner(row: SlotRow) -> None:
    row.assign(ME, 7)
    fill(row)
    row.pin()
    row.free()
    assert (row.status, row.pinned, row.owner) == (SlotStatus.FREE, False, Owner(ME, 7))
    row.free()
    row.absent()
    assert row.owner is None


@pytest.mark.parametrize("word", range(1, 9))
@pytest.mark.parametrize("status", [SlotStatus.CAPTURED, SlotStatus.SEALED])
def test_a_flipped_bit_in_a_field_is_found(
    words: memoryview, row: SlotRow, word: int, status: SlotStatus
) -> None:
    fill(row)
    if status is SlotStatus.SEALED:
        row.sealed()
    row._row[word] ^= 1
    with pytest.raises(PoolDamaged, match=r"row 5 .* free the slot"):
        row.read()
    row.free()
    assert row.read().status is SlotStatus.FREE


def test_a_status_that_is_none_is_found(row: SlotRow) -> None:
    row._row[0] |= 0xFF
    with pytest.raises(PoolDamaged, match=r"row 5 .* status 255"):
        row.read()


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_writer_that_dies_anywhere_in_a_claim_leaves_a_slot_that_is_filling(stop: int) -> None:
    """Whatever it had written by then; before its first word, the old image is whole."""

    class Dies(Exception):
        pass

    class Words:
        """The row, in which the n-th store is the last."""

        def __init__(self, row: memoryview) -> None:
            self.row, self.left = row, stop

        def __getitem__(self, at: int | slice) -> object:
            return self.row[at]

        def __setitem__(self, at: int, number: int) -> None:
            if not self.left:
                raise Dies
            self.left -= 1
            self.row[at] = number

    words = memoryview(bytearray(TABLE_BYTES)).cast("Q")
    Header(words).begin()
    row = SlotRow(words, 0)
    row.present()
    row.assign(ME, 7)
    fill(row)
    row.sealed()
    dying = SlotRow(words, 0)
    dying._row = Words(dying._row)  # type: ignore[assignment]
    try:
        dying.claim(ME, 7, State(3, 121), Due.NOWHERE)
        dying.written(4000, 3)
    except Dies:
        pass
    facts = row.read()
    assert facts.status is SlotStatus.FILLING
    assert row.owner == Owner(ME, 7)


@settings(max_examples=30, deadline=None)
@given(
    generation=st.integers(0, GENERATION_MAX),
    step=st.integers(0, STEP_MAX),
    rank=st.integers(0, 99_999),
    size=st.integers(0, 2**48),
    due=st.sampled_from([Due.NOWHERE, Due.DISK, Due.STORE, Due.DISK | Due.STORE]),
)
def test_all_that_is_written_is_read(
    generation: int, step: int, rank: int, size: int, due: Due
) -> None:
    words = memoryview(bytearray(TABLE_BYTES)).cast("Q")
    row = SlotRow(words, 0)
    row.present()
    row.claim(ME, rank, State(generation, step), due, is_own=False)
    row.written(size, 3)
    expected = (State(generation, step), rank, False, ME, size, 3, due)
    facts = row.read()
    assert expected == (
        facts.state,
        facts.rank,
        facts.is_own,
        facts.writer,
        facts.size_bytes,
        facts.values_bytes,
        facts.due,
    )


def test_a_reader_never_sees_the_fields_of_two_images(row: SlotRow) -> None:
    """One thread goes through images whose fields all follow from the step; one reads."""
    is_over = threading.Event()
    seen: set[int] = set()
    wrong: list[SlotFacts] = []

    def read() -> None:
        while not is_over.is_set():
            facts = row.read()
            if facts.status in (SlotStatus.CAPTURED, SlotStatus.SEALED):
                step = facts.state.step
                seen.add(step)
                if (facts.size_bytes, facts.values_bytes, facts.rank) != (step, step, step):
                    wrong.append(facts)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(100_000):
            if step >= 3000 and len(seen) > 1:
                break
            row.claim(ME, step, State(step, step), Due.NOWHERE)
            row.written(step, step)
            row.sealed()
    finally:
        is_over.set()
        reader.join(60)
    assert not wrong
    assert len(seen) > 1


class FencedAsItIsClaimed:
    """A row's words, of whose pool the fence is raised just before the status becomes FILLING."""

    def __init__(self, words: memoryview, header: Header, generation: int) -> None:
        self._words, self._header, self._generation = words, header, generation

    def __getitem__(self, index: int | slice) -> int | memoryview:
        return self._words[index]

    def __setitem__(self, index: int, word: int) -> None:
        if index == 0:
            self._header.raise_fence(self._generation)
        self._words[index] = word


@pytest.mark.parametrize("status", [SlotStatus.FREE, SlotStatus.SEALED])
def test_a_rank_that_was_stopped_before_it_claimed_takes_nothing_of_a_later_promise(
    status: SlotStatus,
) -> None:
    words = memoryview(bytearray(TABLE_BYTES)).cast("Q")
    header, row = Header(words), SlotRow(words, 3)
    me = Writer(7, 8)
    row.present()
    row.claim(me, 2, State(1, 5), Due.NOWHERE)
    if status is SlotStatus.SEALED:
        row.written(100, 2)
        row.sealed()
        row.pin()
    else:
        row.free()
    before = row.read()
    late = SlotRow(words, 3)
    late._row = FencedAsItIsClaimed(late._row, header, 2)  # type: ignore[assignment]
    with pytest.raises(Stale):
        late.claim(me, 2, State(1, 6), Due.NOWHERE)
    after = row.read()
    assert (after.status, after.state, after.size_bytes) == (
        status,
        before.state,
        before.size_bytes,
    )
    assert row.pinned is (status is SlotStatus.SEALED)

"""The table at the start of a pool: what ranks and keeper tell each other while a run steps. Pure.

The table is words of 64 bits in shared memory; a word is written by one store, so that nobody sees
half of it. Nobody locks, nobody waits: each word has one writer at a time.

    header     magic, version, rows in use, end of the data, generation of the fence
    64 seats   one for each rank of this host: words of the rank, words of the keeper
    1,024 rows one for each slot: status word, fields, place in the file

A row's status word holds the status, a count of its changes, and a checksum of the fields. Fields
are written first and the status word last. A reader reads the status word, the fields, and the
status word again; where they disagree it reads anew. Only a slot that is FILLING may disagree for
long: its writer may have died while it wrote the fields, and who that was, `SlotRow.owner` says.

Who may change a status:

    ABSENT, FREE      own slots: the rank that the keeper assigned them to; else the keeper
    FILLING           its writer, and the keeper once that process has ended
    CAPTURED          the keeper
    SEALED            the keeper; and the rank that owns the slot, by the rule of `slots`
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from keepstep.ckpt.keeper_errors import SlotsTaken, Stale
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool_errors import PoolDamaged, WrongStatus
from keepstep.ckpt.tiers import Due

WORD_BYTES = 8
TABLE_BYTES = 1 << 20
SEATS_MAX = 64
SLOTS_MAX = 1024

VALUES_BYTES = 1 << 18
"""Room for a state's JSON values at the start of each slot; the image comes behind it."""

MAGIC = int.from_bytes(b"keepPool", "little")
VERSION = 1

_SEATS_AT = 64
_SEAT_WORDS = 64
_ROWS_AT = _SEATS_AT + SEATS_MAX * _SEAT_WORDS
_ROW_WORDS = 64

_STATUS_BITS = 8
_TURN_BITS = 24
_READS = 100


class SlotStatus(IntEnum):
    """What a slot is. CAPTURED: its writer is done, and the keeper has yet to seal it."""

    ABSENT = 0
    FREE = 1
    FILLING = 2
    CAPTURED = 3
    SEALED = 4


class Writer(NamedTuple):
    """A process, by pid and start time (clock ticks since boot)."""

    pid: int
    ticks: int


class Owner(NamedTuple):
    """Whom the keeper assigned a slot to: a process, as a rank of the job."""

    writer: Writer
    rank: int


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A row as it was at one moment. See `SlotRow` for the fields.

    For a FILLING slot the rest may be that of an image before it. For FREE and ABSENT it means
    nothing. `turn` counts changes of the status: two facts with the same one are of the same image.
    """

    status: SlotStatus
    turn: int
    state: State
    rank: int
    is_own: bool
    writer: Writer
    size_bytes: int
    values_bytes: int
    due: Due


class Header:
    """The table's first words."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def begin(self) -> None:
        """Make an empty table of zeros. The magic word comes last."""
        self._words[1] = VERSION
        self._words[3] = TABLE_BYTES
        self._words[0] = MAGIC

    def check(self, where: str) -> None:
        """Raise PoolDamaged unless this is a table of our version."""
        if self._words[0] != MAGIC or self._words[1] != VERSION:
            raise PoolDamaged(
                f"{where} is not a pool: expected magic {MAGIC:#x} version {VERSION}, found "
                f"{self._words[0]:#x} version {self._words[1]}; remove it with `keepstep clean`"
            )
        if self.rows > SLOTS_MAX or self.data_end < TABLE_BYTES:
            raise PoolDamaged(
                f"{where}: {self.rows} rows, of at most {SLOTS_MAX}, and an end of the data at "
                f"{self.data_end}; remove it with `keepstep clean`"
            )

    @property
    def rows(self) -> int:
        """Rows that were ever used; the others are ABSENT."""
        return int(self._words[2])

    @rows.setter
    def rows(self, count: int) -> None:
        self._words[2] = count

    @property
    def data_end(self) -> int:
        """Where the file's last slot ends, in bytes."""
        return int(self._words[3])

    @data_end.setter
    def data_end(self, offset: int) -> None:
        self._words[3] = offset

    @property
    def fence(self) -> int:
        """Generation below which nobody may claim a slot."""
        return int(self._words[4])

    def raise_fence(self, generation: int) -> None:
        """By the keeper, when it promises: older generations claim nothing from now on."""
        self._words[4] = max(generation, int(self._words[4]))


class _Word:
    """A word of a seat that holds a number from 0 on."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, seat: Seat, kind: type[Seat]) -> int:
        return int(seat.words[seat.start + self._place])

    def __set__(self, seat: Seat, number: int) -> None:
        seat.words[seat.start + self._place] = number


class _StepWord(_Word):
    """A word of a seat that holds a step; -1: none yet."""

    def __get__(self, seat: Seat, kind: type[Seat]) -> int:
        return super().__get__(seat, kind) - 1

    def __set__(self, seat: Seat, step: int) -> None:
        super().__set__(seat, step + 1)


class Seat:
    """What one rank and its keeper tell each other. Steps are -1 while there is none.

    Attributes:
        index: in the table.
        generation: that the rank entered.

    By the rank:
        agreed_acked: newest step that all ranks know to be sealed and acknowledged on all ranks.
        agreed_drained: newest due step that no rank's slot is needed for.
        captured: newest step that it captured.
        skipped: captures skipped so far.

    By the keeper:
        sealed: newest step of the rank that it sealed.
        acked: newest that all peers hold, too.
        drained: newest due step of which the slot is needed no more.
        committed: newest step in the log.
        newest_seen: counts up while the keeper lives.
        failures: of tiers, counted.
        lost: newest step that the rank captured and that could not be sealed. Written before any
            newer step is `sealed`; see `slots.Level`.
    """

    generation = _Word(1)
    sealed = _StepWord(8)
    acked = _StepWord(9)
    drained = _StepWord(10)
    committed = _StepWord(11)
    newest_seen = _Word(12)
    failures = _Word(13)
    lost = _StepWord(14)
    agreed_acked = _StepWord(24)
    agreed_drained = _StepWord(25)
    captured = _StepWord(26)
    skipped = _Word(27)

    def __init__(self, words: memoryview, index: int) -> None:
        self.words = words
        self.index = index
        self.start = _SEATS_AT + index * _SEAT_WORDS

    @property
    def rank(self) -> int:
        """Who sits here; -1: nobody."""
        return int(self.words[self.start]) - 1

    @property
    def is_taken(self) -> bool:
        return self.rank >= 0

    @property
    def writer(self) -> Writer:
        """The rank's process."""
        return Writer(int(self.words[self.start + 2]), int(self.words[self.start + 3]))

    def take(self, rank: int, writer: Writer, generation: int) -> None:
        """By the keeper: the rank enters, and all words are as at a beginning."""
        self.leave()
        for place in range(1, _SEAT_WORDS):
            self.words[self.start + place] = 0
        self.generation = generation
        self.words[self.start + 2] = writer.pid
        self.words[self.start + 3] = writer.ticks
        self.words[self.start] = rank + 1

    def leave(self) -> None:
        """By the keeper: nobody sits here any more."""
        self.words[self.start] = 0


class SlotRow:
    """One row. Attributes are read from shared memory each time; `read` reads all at one moment.

    Attributes:
        index: in the table.
    """

    _FIELDS = slice(1, 9)  # generation, step, rank, is_own, pid, ticks, size, values: checksummed
    _DUE, _PINNED, _OFFSET, _CAPACITY, _VALUES_SUM, _OWNER = 16, 17, 18, 19, 20, 24

    def __init__(self, words: memoryview, index: int) -> None:
        start = _ROWS_AT + index * _ROW_WORDS
        self.index = index
        self._header = Header(words)
        self._row = words[start : start + _ROW_WORDS]

    @property
    def status(self) -> SlotStatus:
        return _status(self._row[0], self.index)

    @property
    def state(self) -> State:
        """Whose image it is. Means something from FILLING on."""
        return State(int(self._row[1]), int(self._row[2]))

    @property
    def rank(self) -> int:
        """Whose image it is. Means something from FILLING on."""
        return int(self._row[3])

    @property
    def is_own(self) -> bool:
        """Of a rank of this host; else of a peer's."""
        return bool(self._row[4])

    @property
    def writer(self) -> Writer:
        """Who fills or filled it."""
        return Writer(int(self._row[5]), int(self._row[6]))

    @property
    def size_bytes(self) -> int:
        """Length of the image; 0 before it is captured."""
        return int(self._row[7])

    @property
    def values_bytes(self) -> int:
        """Length of the JSON values; 0 before it is captured."""
        return int(self._row[8])

    @property
    def due(self) -> Due:
        """The tiers that the image is to go to."""
        return Due(int(self._row[self._DUE]))

    def set_due(self, due: Due) -> None:
        """By the keeper: from now on the image is to go there."""
        self._row[self._DUE] = int(due)

    @property
    def values_sum(self) -> int:
        """Checksum of the values, as they were when the image was sealed."""
        return int(self._row[self._VALUES_SUM])

    @values_sum.setter
    def values_sum(self, number: int) -> None:
        """By the keeper, of a CAPTURED slot."""
        self._row[self._VALUES_SUM] = number

    @property
    def pinned(self) -> bool:
        """Listed in a promise: see `Header.fence`, which keeps older generations away."""
        return bool(self._row[self._PINNED])

    def pin(self) -> None:
        """By the keeper: the image is part of a promise."""
        self._row[self._PINNED] = 1

    def unpin(self) -> None:
        """By the keeper: the promise is kept. Also done by `claim` and `free`."""
        self._row[self._PINNED] = 0

    @property
    def values_offset_bytes(self) -> int:
        """Where the slot begins in the pool's file: with its values."""
        return int(self._row[self._OFFSET])

    @property
    def image_offset_bytes(self) -> int:
        """Where the image begins in the pool's file; a multiple of the page."""
        return self.values_offset_bytes + VALUES_BYTES

    @property
    def capacity_bytes(self) -> int:
        """The largest image that fits; whole pages."""
        return int(self._row[self._CAPACITY])

    def place(self, offset: int, capacity_bytes: int) -> None:
        """By the keeper, of an ABSENT row: where the slot lies in the file."""
        self._expect(SlotStatus.ABSENT)
        self._row[self._OFFSET] = offset
        self._row[self._CAPACITY] = capacity_bytes

    @property
    def owner(self) -> Owner | None:
        """Whom the keeper assigned the slot to, whatever image is in it now; None: nobody."""
        pid, ticks, rank = self._row[self._OWNER : self._OWNER + 3]
        return Owner(Writer(int(pid), int(ticks)), int(rank)) if pid else None

    def assign(self, writer: Writer, rank: int) -> None:
        """By the keeper: from now on only this process may claim the slot. Its image stays."""
        self.unassign()
        self._row[self._OWNER + 1] = writer.ticks
        self._row[self._OWNER + 2] = rank
        self._row[self._OWNER] = writer.pid

    def unassign(self) -> None:
        """By the keeper: nobody owns the slot any more. Its image stays."""
        self._row[self._OWNER] = 0

    def read(self) -> SlotFacts:
        """The row at one moment. Raises PoolDamaged where that cannot be had."""
        for _ in range(_READS):
            word = self._row[0]
            fields = tuple(self._row[self._FIELDS])
            check = self._check()
            due = self.due
            if word == self._row[0]:
                status = _status(word, self.index)
                if status < SlotStatus.CAPTURED or check == word >> _STATUS_BITS + _TURN_BITS:
                    break
        else:
            raise PoolDamaged(
                f"row {self.index} of the pool's table: the fields {fields} do not match their "
                f"checksum in {word:#x}; the image is lost, free the slot"
            )
        generation, step, rank, is_own, pid, ticks, size_bytes, values_bytes = fields
        turn = word >> _STATUS_BITS & (1 << _TURN_BITS) - 1
        return SlotFacts(
            status,
            turn,
            State(generation, step),
            rank,
            bool(is_own),
            Writer(pid, ticks),
            size_bytes,
            values_bytes,
            due,
        )

    def is_still(self, facts: SlotFacts) -> bool:
        """Whether nothing has happened to the slot since it was read: no status, no new image."""
        return int(self._row[0]) >> _STATUS_BITS & (1 << _TURN_BITS) - 1 == facts.turn

    def claim(self, writer: Writer, rank: int, state: State, due: Due, is_own: bool = True) -> None:
        """FREE or SEALED -> FILLING: `writer` is about to write the image of `rank` in `state`.

        Raises:
            Stale: a newer generation was promised (see `Header.raise_fence`).
            SlotsTaken: the slot is assigned to another process.
            WrongStatus: the slot is neither FREE nor SEALED.
        """
        self._check_fence(state)
        owner = self.owner
        if owner is not None and owner.writer != writer:
            raise SlotsTaken(
                f"slot {self.index} belongs to pid {owner.writer.pid} (rank {owner.rank}), not to "
                f"pid {writer.pid}; enter the generation anew to get slots",
                pid=owner.writer.pid,
            )
        before = self.status
        self._expect(SlotStatus.FREE, SlotStatus.SEALED)
        self._set(SlotStatus.FILLING)
        try:
            self._check_fence(state)  # once more: we may have been stopped for long in between
        except Stale:
            self._set(before)
            raise
        self.unpin()
        self._row[1] = state.generation
        self._row[2] = state.step
        self._row[3] = rank
        self._row[4] = int(is_own)
        self._row[5] = writer.pid
        self._row[6] = writer.ticks
        self._row[7] = 0
        self._row[8] = 0
        self.set_due(due)

    def written(self, size_bytes: int, values_bytes: int) -> None:
        """FILLING -> CAPTURED: image and values are in place. (`Slot.captured` calls this.)"""
        self._expect(SlotStatus.FILLING)
        self._row[7] = size_bytes
        self._row[8] = values_bytes
        self._set(SlotStatus.CAPTURED)

    def sealed(self) -> None:
        """CAPTURED -> SEALED: the image's checksums are in its header."""
        self._expect(SlotStatus.CAPTURED)
        self._set(SlotStatus.SEALED)

    def free(self) -> None:
        """Anything but ABSENT -> FREE, and not pinned. Free already: no error."""
        self._expect(*(status for status in SlotStatus if status))
        self._set(SlotStatus.FREE)
        self.unpin()

    def present(self) -> None:
        """ABSENT -> FREE: the slot's memory is there."""
        self._expect(SlotStatus.ABSENT)
        self._set(SlotStatus.FREE)

    def absent(self) -> None:
        """-> ABSENT: the slot's memory is about to go. It keeps its place in the file."""
        self._set(SlotStatus.ABSENT)
        self.unpin()
        self.unassign()

    def _check_fence(self, state: State) -> None:
        fence = self._header.fence
        if state.generation < fence:
            raise Stale(
                f"slot {self.index} may not take {state_words(state)}: the keeper of this host "
                f"promised generation {fence}; this process is superseded, end it",
                generation=fence,
            )

    def _expect(self, *statuses: SlotStatus) -> None:
        found = self.status
        if found not in statuses:
            raise WrongStatus(
                f"slot {self.index} of the pool ({state_words(self.state)}, rank {self.rank}, "
                f"written by pid {self.writer.pid}): expected "
                f"{' or '.join(s.name for s in statuses)}, found {found.name}; two processes think "
                "they own it"
            )

    def _set(self, status: SlotStatus) -> None:
        """One store: the status, one more turn, the checksum of the fields as they are."""
        turn = (self._row[0] >> _STATUS_BITS) + 1 & (1 << _TURN_BITS) - 1
        check = self._check() << _STATUS_BITS + _TURN_BITS
        self._row[0] = check | turn << _STATUS_BITS | status

    def _check(self) -> int:
        return zlib.crc32(self._row[self._FIELDS])


def _status(word: int, index: int) -> SlotStatus:
    number = word & (1 << _STATUS_BITS) - 1
    if number > SlotStatus.SEALED:
        raise PoolDamaged(f"row {index} of the pool's table has status {number}")
    return SlotStatus(number)

"""The log of a store: read it, take a term, append. The only authority on what is committed (D6).

An entry is appended by put-if-absent of the next `seq`, so the store, not we, decides who was
first. What comes back, and what it means (docs/format.md, "Appending"):

    written                 ours
    taken, by our own id    ours: an earlier answer of the store was lost
    taken, higher term      we have been superseded: stop
    taken, else             somebody was first: try the next seq
    unknown, or transient   put the *same* entry at the *same* seq again, until one is read there
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TypeVar

from keepstep.ckpt.entry import (
    RECORD_BYTES_MAX,
    Body,
    Record,
    Term,
    decode_record,
    encode_record,
)
from keepstep.ckpt.errors import (
    FormatError,
    LogError,
    LogMoved,
    NewerVersion,
    NotRestorable,
    Superseded,
    WrongJob,
)
from keepstep.ckpt.keys import LOG_PREFIX, EntryKey, entry_key, parse_key
from keepstep.ckpt.lineage import Fold, Lineage, state_words
from keepstep.ckpt.manifest import State
from keepstep.storage.errors import AlreadyExists, NotFound, OutcomeUnknown, TooLarge, Transient
from keepstep.storage.store import Store

TRIES_MAX = 8
_PAUSE_FIRST_S = 0.05
_RACES_MAX = 1_000
_ADVICE = (
    "The log cannot be read past it: restore this file from a copy of the store. "
    "Nothing was changed."
)

T = TypeVar("T")


def utc_now() -> str:
    """The time by this host's clock, as the log writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_entry_id() -> str:
    """32 hex digits that nobody else will make."""
    return secrets.token_hex(16)


def read_entry(store: Store, seq: int) -> Record | None:
    """The entry at `seq`, checked; None if there is none.

    Raises FormatError, which names the file and says what to do, and StoreError.
    """
    key = entry_key(seq)
    try:
        record = decode_record(store.get(key, RECORD_BYTES_MAX), key)
    except NotFound:
        return None
    except TooLarge as error:
        most = f"at most {RECORD_BYTES_MAX} bytes"
        raise FormatError(key, "", most, str(error), _ADVICE) from error
    except NewerVersion:
        raise
    except FormatError as error:
        raise FormatError(key, error.field, error.expected, error.found, _ADVICE) from error
    if record.seq != seq:
        raise FormatError(key, "seq", str(seq), str(record.seq), _ADVICE)
    if isinstance(record.body, Term) and record.body.number != record.term:
        number = str(record.body.number)
        raise FormatError(key, "body.number", str(record.term), number, _ADVICE)
    return record


def read_entries(store: Store) -> Iterator[Record]:
    """All entries up to the first place without one. Raises as `read_entry`."""
    seq = 0
    while (record := read_entry(store, seq)) is not None:
        yield record
        seq += 1


class Log:
    """One reader and writer of a store's log. Remembers how far it has read. Not thread-safe.

    Args:
        store: where the log is. To be appended to, it must be able to put-if-absent.
        job: the job's name. A log of another job is refused (WrongJob). None: whichever job the
            log belongs to; an empty log can then not be begun.
        clock: gives the time for people, RFC 3339 UTC.
        new_id: gives a fresh id for each entry.
        sleep: waits so many seconds between two tries.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str | None = None,
        clock: Callable[[], str] = utc_now,
        new_id: Callable[[], str] = new_entry_id,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._job = job
        self._clock = clock
        self._new_id = new_id
        self._sleep = sleep
        self._fold = Fold()
        self._next_seq = 0
        self._term: int | None = None
        self._is_whole = False

    @property
    def store(self) -> Store:
        """The store whose log this is."""
        return self._store

    @property
    def term(self) -> int | None:
        """The term that this writer took or continued; None before."""
        return self._term

    def known(self) -> Lineage:
        """What the log says as far as it has been read, or written, here. Asks no store."""
        return self._fold.lineage()

    def read(self) -> Lineage:
        """What the log says now. Reads on from the last entry known.

        Raises:
            FormatError: an entry is damaged, missing, or from a newer version; names the file.
            WrongJob: the store belongs to another job.
            StoreError: the store cannot be read.
        """
        self._read_on()
        if not self._is_whole:
            self._check_nothing_is_missing()
            self._is_whole = True
        return self.known()

    def take_term(self, by: str) -> int:
        """Take the next term: who held the last one can append nothing any more that counts.

        Args:
            by: who takes it, for people: role, host and pid.

        Raises: as `read` and `append`.
        """
        self._check_store()
        self._term = None
        for _ in range(_RACES_MAX):
            number = self.read().term + 1
            mine = self._record(Term(number=number, by=by), number)
            if self._try(mine):
                self._term = number
                return number
        raise LogError(self._lost_races("take a term"))

    def continue_term(self, term: int) -> None:
        """Write under `term`, which another process of the same run took: the keeper of rank 0.

        All who write under one term must write what the others may find before their own: commits
        of one committer, and what `append_if_last` or `append_from` decided.

        Raises:
            Superseded: a higher term has been taken.
            LogError: nobody took this term; or the store cannot put-if-absent.
            FormatError, WrongJob, StoreError: as `read`.
        """
        self._check_store()
        newest = self.read().term
        if newest < term:
            raise LogError(
                f"nobody has taken term {term} of the log in {self._store.url}: its newest is "
                f"{newest}; take_term() comes before continue_term()"
            )
        self._term = term
        self.check_not_superseded()

    def append(self, body: Body) -> Record:
        """Append `body` under this writer's term. Durable on return.

        Entries that others appended meanwhile are read, and stay before it.

        Raises:
            Superseded: a higher term has been taken. Nothing was appended.
            OutcomeUnknown: the store did not answer; the entry may or may not be in the log.
            LogError: no term was taken; or the store cannot put-if-absent.
            StoreError: the store refused; nothing was appended.
            FormatError: as `read`.
        """
        if self._term is None:
            raise LogError("take_term() or continue_term() comes before append()")
        for _ in range(_RACES_MAX):
            self.check_not_superseded()
            mine = self._record(body, self._term)
            if self._try(mine):
                return mine
        raise LogError(self._lost_races("append"))

    def append_if_last(self, body: Body, next_seq: int) -> Record:
        """As `append`, but only if the entry gets exactly the place `next_seq`.

        For what was decided from `Lineage.next_seq` on and would be wrong after another entry:
        the base of a generation, what to retire. Without a term of its own it writes under the
        current one, which disturbs nobody.

        Raises:
            LogMoved: another entry came first. Nothing was appended: read, and decide again.
            LogError: the store cannot put-if-absent.
        """
        self._check_store()
        self.check_not_superseded()
        if next_seq == self._next_seq:
            mine = self._record(body, self._term or self._fold.term.number)
            if self._try(mine):
                return mine
            self.check_not_superseded()
        raise LogMoved(
            f"entry {next_seq} of the log in {self._store.url} is another writer's; "
            "read the log and decide again"
        )

    def append_from(self, base: State | None, body: Body) -> Record:
        """As `append`, but exactly at the place after what shows that `base` is admitted.

        For what goes on from `base`, committed or not: between a look at the log and the entry, a
        collection may have retired it. None: from nothing, which nobody can retire.

        Raises:
            NotRestorable: `Lineage.admits` refuses `base`. Nothing was appended.
        """
        for _ in range(_RACES_MAX):
            lineage = self.read()
            reason = "" if base is None else lineage.admits(base)
            if reason:
                raise NotRestorable(
                    f"nothing can go on from {state_words(base)} in {self._store.url} any more: "
                    f"{reason}; start again"
                )
            try:
                return self.append_if_last(body, lineage.next_seq)
            except LogMoved:
                continue
        raise LogError(self._lost_races("append"))

    def _record(self, body: Body, term: int) -> Record:
        job = self._job
        if job is None:
            raise LogError(f"{self._store.url} holds no job yet; only a run can begin its log")
        return Record(
            seq=self._next_seq, id=self._new_id(), job=job, term=term, at=self._clock(), body=body
        )

    def _try(self, mine: Record) -> bool:
        """Bring `mine` to its place, or find another entry there. Reads whichever it was."""
        data = encode_record(mine)

        def put_and_read() -> Record:
            key = entry_key(mine.seq)
            try:
                self._store.put_if_absent(key, data)
            except AlreadyExists:
                return self._get_taken(mine.seq)
            return mine

        there = self._patiently(put_and_read)
        self._take(there)
        return there.id == mine.id

    def _patiently(self, call: Callable[[], T]) -> T:
        """`call`, again after a pause while the store fails in a way that may pass."""
        pause_s = _PAUSE_FIRST_S
        is_unknown = False
        for remaining in reversed(range(TRIES_MAX)):
            try:
                return call()
            except (OutcomeUnknown, Transient) as error:
                is_unknown = is_unknown or isinstance(error, OutcomeUnknown)
                if remaining == 0:
                    if is_unknown and not isinstance(error, OutcomeUnknown):
                        # One of the tries may have done it, whatever the last one says.
                        raise OutcomeUnknown(
                            str(error), operation=error.operation, key=error.key, where=error.where
                        ) from error
                    raise
            self._sleep(pause_s)
            pause_s *= 2
        raise LogError("unreachable: the last try returns or raises")

    def _read_on(self) -> None:
        while (
            record := self._patiently(lambda: read_entry(self._store, self._next_seq))
        ) is not None:
            self._take(record)

    def _get_taken(self, seq: int) -> Record:
        record = read_entry(self._store, seq)
        if record is None:
            key = entry_key(seq)
            raise Transient(
                f"{self._store.url} says that {key} exists, but does not find it yet",
                operation="get",
                key=key,
                where=self._store.url,
            )
        return record

    def _take(self, record: Record) -> None:
        if self._job is None:
            self._job = record.job
        elif record.job != self._job:
            raise WrongJob(
                f"{self._store.url} belongs to job {record.job!r}, not to {self._job!r}: "
                "one store holds one job; choose another store, or the job's own name",
                found=record.job,
                expected=self._job,
            )
        self._fold.add(record)
        self._next_seq = record.seq + 1

    def _check_store(self) -> None:
        """Only writers ask: a store may have to be written to, to find out."""
        if not self._patiently(lambda: self._store.capabilities).put_if_absent:
            raise LogError(
                f"{self._store.url} cannot write an object only if its name is free "
                "(put-if-absent), so two runs could overwrite each other's log there; use another "
                "store, or, if only one run ever writes there, add ?single_writer=true to its URL"
            )

    def check_not_superseded(self) -> None:
        """As far as the log has been read: does this writer's term still stand?

        Raises:
            Superseded: a higher term has been taken.
        """
        newest, seq = self._fold.term, self._fold.term_seq
        if self._term is not None and newest.number > self._term:
            raise Superseded(
                f"the run that held term {self._term} of job {self._job!r} has been superseded: "
                f"{newest.by} took term {newest.number} at entry {seq} of the log in "
                f"{self._store.url}; this one must stop",
                term=newest.number,
                by=newest.by,
                seq=seq,
            )

    def _check_nothing_is_missing(self) -> None:
        """A hole must not pass for the end: the history would silently be shorter (I4)."""
        last = self._patiently(self._last_listed)
        self._read_on()
        if last >= self._next_seq:
            missing = entry_key(self._next_seq)
            raise FormatError(missing, "", "an entry of the log", "no such file", _ADVICE)

    def _last_listed(self) -> int:
        keys = (parse_key(info.key) for info in self._store.list(LOG_PREFIX))
        return max((key.seq for key in keys if isinstance(key, EntryKey)), default=-1)

    def _lost_races(self, what: str) -> str:
        return (
            f"could not {what}: others were first {_RACES_MAX} times in a row at the log in "
            f"{self._store.url}; find out who writes there"
        )

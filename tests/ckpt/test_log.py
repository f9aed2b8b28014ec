"""The log: one winner per place, lost answers, terms, and damage that is never read past."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.logs import bad, commit, generation, good, open_log, record, retire, state

from keepstep.ckpt.entry import Body, Term, decode_record, encode_record
from keepstep.ckpt.errors import (
    FormatError,
    LogError,
    LogMoved,
    NewerVersion,
    NotRestorable,
    Superseded,
    WrongJob,
)
from keepstep.ckpt.keys import entry_key
from keepstep.ckpt.lineage import fold
from keepstep.ckpt.log import TRIES_MAX, Log, new_entry_id, read_entry, utc_now
from keepstep.ckpt.manifest import State
from keepstep.storage.errors import NoSpace, OutcomeUnknown, Transient
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Buffer, Capabilities, Store

PUTS = frozenset({"put_if_absent"})
GETS = frozenset({"get"})


def bodies(store: Store) -> list[Body]:
    found = []
    while (entry := read_entry(store, len(found))) is not None:
        found.append(entry.body)
    return found


def begun(store: Store) -> None:
    log = open_log(store)
    log.take_term("trainer on host-a, pid 1")
    log.append(generation(1))


def test_entries_follow_each_other_and_are_read_back() -> None:
    store = MemoryStore()
    log = open_log(store)
    assert log.take_term("trainer") == 1
    appended = [log.append(generation(1)), log.append(commit(1, 10))]
    assert [each.seq for each in appended] == [1, 2]
    assert bodies(store) == [Term(number=1, by="trainer"), generation(1), commit(1, 10)]
    lineage = open_log(store).read()
    assert lineage.job == "run-a"
    assert lineage.next_seq == 3
    assert lineage == log.read()


def test_an_append_costs_one_store_call_however_long_the_log() -> None:
    store = FaultyStore(MemoryStore())
    begun(store)
    log = open_log(store)
    log.take_term("trainer")
    log.append(generation(2))
    for step in range(1, 50):
        before = len(store.calls)
        log.append(commit(2, step))
        assert store.calls[before:] == [("put_if_absent", entry_key(3 + step))]


def test_a_read_goes_on_from_the_last_entry_known() -> None:
    store = FaultyStore(MemoryStore())
    begun(store)
    log = open_log(store)
    log.read()
    before = len(store.calls)
    log.read()
    assert store.calls[before:] == [("get", entry_key(2))]


@pytest.mark.parametrize("action", [Action.LOSE_ANSWER, Action.FAIL])
@pytest.mark.parametrize("error", [OutcomeUnknown, Transient])
def test_a_lost_answer_neither_loses_nor_doubles_an_entry(
    action: Action, error: type[OutcomeUnknown] | type[Transient]
) -> None:
    """Even a store that says "nothing happened" and lies is seen through: the id decides."""
    for at in range(3):
        inner = MemoryStore()
        store = FaultyStore(inner, Fault(action, at=at, times=2, operations=PUTS, error=error))
        pauses: list[float] = []
        log = open_log(store, pauses=pauses)
        log.take_term("trainer")
        log.append(generation(1))
        log.append(commit(1, 10))
        assert bodies(inner) == [Term(number=1, by="trainer"), generation(1), commit(1, 10)]
        assert pauses
        assert log.read() == open_log(inner).read()


def test_a_failed_read_after_a_lost_answer_is_tried_again() -> None:
    inner = MemoryStore()
    begun(inner)
    store = FaultyStore(
        inner,
        Fault(Action.LOSE_ANSWER, at=1, operations=PUTS),
        Fault(Action.FAIL, at=0, operations=GETS, key_prefix=entry_key(3)),
    )
    log = open_log(store)
    log.take_term("trainer")
    assert log.append(generation(2)).seq == 3
    assert len(bodies(inner)) == 4


def test_pauses_grow_and_end() -> None:
    store = MemoryStore()
    begun(store)
    pauses: list[float] = []
    faulty = FaultyStore(store, Fault(Action.FAIL, times=1000, operations=PUTS))
    log = open_log(faulty, pauses=pauses)
    with pytest.raises(Transient):
        log.take_term("trainer")
    assert len(pauses) == TRIES_MAX - 1
    assert pauses == sorted(pauses)
    assert sum(pauses) < 60


def test_an_outcome_stays_unknown_when_the_last_tries_say_nothing_happened() -> None:
    store = MemoryStore()
    begun(store)
    faulty = FaultyStore(
        store,
        Fault(Action.FAIL, at=1, operations=PUTS, error=OutcomeUnknown),
        Fault(Action.FAIL, at=1, times=1000, operations=PUTS),
    )
    log = open_log(faulty)
    log.take_term("trainer")
    with pytest.raises(OutcomeUnknown):
        log.append(commit(1, 10))


def test_after_an_unknown_outcome_the_next_append_finds_the_truth() -> None:
    """The entry had arrived after all: the next one comes after it, and both count."""
    store = MemoryStore()
    begun(store)
    lost = Fault(Action.LOSE_ANSWER, at=1, operations=PUTS)
    then_down = Fault(Action.FAIL, at=2, times=TRIES_MAX - 1, operations=PUTS)
    log = open_log(FaultyStore(store, lost, then_down))
    log.take_term("trainer")
    with pytest.raises(OutcomeUnknown):
        log.append(generation(2))
    assert log.append(commit(2, 10)).seq == 4
    assert bodies(store)[2:] == [Term(number=2, by="trainer"), generation(2), commit(2, 10)]


def test_permanent_errors_come_through_with_their_errno() -> None:
    store = MemoryStore()
    begun(store)
    full = Fault(Action.FAIL, at=1, operations=PUTS, error=NoSpace, errno=28)
    log = open_log(FaultyStore(store, full))
    log.take_term("trainer")
    with pytest.raises(NoSpace) as caught:
        log.append(commit(1, 10))
    assert caught.value.errno == 28
    assert log.append(generation(2)).seq == 3


def test_who_is_superseded_is_told_by_whom_and_where() -> None:
    store = MemoryStore()
    old = open_log(store)
    old.take_term("trainer on host-a, pid 1")
    old.append(generation(1))
    new = open_log(store)
    assert new.take_term("trainer on host-b, pid 2") == 2
    with pytest.raises(Superseded, match=r"trainer on host-b, pid 2 took term 2 at entry 2") as got:
        old.append(commit(1, 10))
    assert (got.value.term, got.value.by, got.value.seq) == (2, "trainer on host-b, pid 2", 2)
    with pytest.raises(Superseded):
        old.append(commit(1, 10))
    with pytest.raises(Superseded):
        old.append_if_last(commit(1, 10), old.read().next_seq)
    assert len(bodies(store)) == 3


def test_an_append_without_a_term_is_refused() -> None:
    with pytest.raises(LogError, match="take_term"):
        open_log(MemoryStore()).append(generation(1))


def test_appends_of_the_same_term_take_turns() -> None:
    """A collection borrows the term of the run beside it; neither loses an entry."""
    store = MemoryStore()
    begun(store)
    run = open_log(store)
    run.take_term("trainer")
    guest = open_log(store)
    lineage = guest.read()
    assert guest.append_if_last(commit(1, 1), lineage.next_seq).term == 2
    assert run.append(generation(2)).seq == lineage.next_seq + 1


def test_append_if_last_appends_nothing_when_the_log_has_moved() -> None:
    store = MemoryStore()
    begun(store)
    guest = open_log(store)
    before = guest.read()
    run = open_log(store)
    run.take_term("trainer")
    with pytest.raises(LogMoved):
        guest.append_if_last(commit(1, 10), before.next_seq)
    with pytest.raises(LogMoved):
        guest.append_if_last(commit(1, 10), before.next_seq)
    assert len(bodies(store)) == 3
    assert guest.append_if_last(commit(1, 10), guest.read().next_seq).seq == 3


def test_racers_get_distinct_terms_and_lose_nothing(tmp_path: Path) -> None:
    """Real threads on a real directory: exactly one wins each place."""
    store = FileStore(tmp_path)
    barrier = threading.Barrier(4)
    terms: list[int] = []

    def race() -> None:
        log = open_log(store)
        barrier.wait()
        terms.append(log.take_term("racer"))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(terms) == [1, 2, 3, 4]
    assert open_log(store).read().ignored == ()


def test_a_store_of_another_job_is_refused_with_both_names() -> None:
    store = MemoryStore()
    begun(store)
    with pytest.raises(WrongJob, match=r"job 'run-a', not to 'run-b'") as caught:
        open_log(store, job="run-b").take_term("trainer")
    assert (caught.value.expected, caught.value.found) == ("run-b", "run-a")


def test_of_two_jobs_that_begin_at_once_one_is_refused() -> None:
    """The other is first between our reading the empty log and our first entry."""
    inner = MemoryStore()

    class Meddled(FaultyStore):
        def put_if_absent(self, key: str, data: object) -> None:
            if key == entry_key(0):
                open_log(inner, job="run-b").take_term("the other")
            super().put_if_absent(key, data)  # type: ignore[arg-type]

    with pytest.raises(WrongJob, match=r"'run-b', not to 'run-a'"):
        open_log(Meddled(inner)).take_term("trainer")


def test_an_empty_log_cannot_be_begun_without_a_job() -> None:
    with pytest.raises(LogError, match="holds no job"):
        open_log(MemoryStore(), job=None).take_term("somebody")


def test_a_store_that_cannot_put_if_absent_is_read_and_never_appended_to() -> None:
    class Copied(MemoryStore):
        is_plain = False

        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(put_if_absent=not self.is_plain, durable=True)

    store = Copied()
    begun(store)
    store.is_plain = True
    log = open_log(store)
    assert log.read().next_seq == 2
    with pytest.raises(LogError, match=r"only if its name is free"):
        log.take_term("trainer")
    with pytest.raises(LogError, match=r"only if its name is free"):
        log.append_if_last(commit(1, 10), 2)
    assert log.read().next_seq == 2


def damaged(store: MemoryStore, seq: int, data: bytes) -> None:
    store.put(entry_key(seq), data)


def test_every_flipped_bit_of_an_entry_is_found() -> None:
    store = MemoryStore()
    begun(store)
    good = store.get(entry_key(1), 1 << 20)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        damaged(store, 1, bytes(bad))
        with pytest.raises(FormatError, match=r"log/000000/000000001") as caught:
            open_log(store).read()
        assert "restore this file" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\n", b"x" * 100, b"\x80\x04K\x01."])
def test_other_bytes_in_place_of_an_entry_are_refused(data: bytes) -> None:
    store = MemoryStore()
    begun(store)
    damaged(store, 1, data)
    with pytest.raises(FormatError, match=r"log/000000/000000001"):
        open_log(store).read()


def test_a_missing_entry_is_not_taken_for_the_end() -> None:
    store = MemoryStore()
    begun(store)
    log = open_log(store)
    log.take_term("trainer")
    store.delete(entry_key(1))
    with pytest.raises(FormatError, match=r"log/000000/000000001.*no such file"):
        open_log(store).read()
    store.delete(entry_key(0))
    with pytest.raises(FormatError, match=r"log/000000/000000000.*no such file"):
        open_log(store).read()


def test_an_entry_in_anothers_place_is_refused() -> None:
    store = MemoryStore()
    begun(store)
    damaged(store, 1, store.get(entry_key(0), 1 << 20))
    with pytest.raises(FormatError, match=r"seq: expected 1, found 0"):
        open_log(store).read()


def test_a_term_entry_under_another_term_is_refused() -> None:
    store = MemoryStore()
    begun(store)
    store.put(entry_key(2), encode_record(record(2, 1, Term(number=2, by="x"))))
    with pytest.raises(FormatError, match=r"body.number: expected 1, found 2"):
        open_log(store).read()


def test_an_entry_of_a_newer_format_is_refused_as_such() -> None:
    store = MemoryStore()
    begun(store)
    from keepstep.ckpt.checksum import digest128

    text = encode_record(record(1, 1, generation(1)))[33:-1].replace(b'"format":1', b'"format":2')
    damaged(store, 1, digest128(text).encode() + b"\n" + text + b"\n")
    with pytest.raises(NewerVersion):
        open_log(store).read()


def test_an_entry_of_another_job_in_the_middle_is_refused() -> None:
    store = MemoryStore()
    begun(store)
    store.put(entry_key(2), encode_record(record(2, 1, commit(1, 10), job="run-b")))
    with pytest.raises(WrongJob):
        open_log(store).read()


def test_a_crash_at_any_write_leaves_a_readable_log() -> None:
    """Goal: whoever dies where, the log is a prefix of what was meant, and can be gone on with."""

    def run(store: Store) -> None:
        log = open_log(store)
        log.take_term("trainer")
        log.append(generation(1))
        log.append(commit(1, 10))
        log.append(commit(1, 20))

    whole = FaultyStore(MemoryStore())
    run(whole)
    writes = sum(operation in WRITES for operation, _ in whole.calls)
    expected = bodies(whole)
    for action in (Action.CRASH_BEFORE, Action.CRASH_AFTER):
        for at in range(writes):
            inner = MemoryStore()
            with pytest.raises(Crashed):
                run(FaultyStore(inner, Fault(action, at=at, operations=WRITES)))
            left = bodies(inner)
            assert left == expected[: len(left)]
            successor = open_log(inner)
            successor.take_term("successor")
            last = successor.read()
            base = last.live[0].state if last.live else None
            successor.append(generation(2, base))
            assert successor.read().ignored == ()


def test_the_default_clock_and_ids_are_what_the_format_wants() -> None:
    made = record(0, 1, Term(number=1, by="x"))
    stamped = type(made)(
        seq=0, id=new_entry_id(), job="run-a", term=1, at=utc_now(), body=made.body
    )
    assert decode_record(encode_record(stamped), "entry") == stamped
    assert new_entry_id() != new_entry_id()


def test_reading_takes_the_log_for_what_the_fold_says() -> None:
    store = MemoryStore()
    begun(store)
    log = open_log(store)
    log.take_term("trainer")
    log.append(generation(2, state(1, 5)))
    log.append(commit(2, 10))
    entries = [read_entry(store, seq) for seq in range(5)]
    assert log.read() == fold(entry for entry in entries if entry is not None)


class Busy(MemoryStore):
    """Lets somebody else act right before an entry would be put."""

    def __init__(self) -> None:
        super().__init__()
        self.intruder: Callable[[], object] | None = None

    def put_if_absent(self, key: str, data: Buffer) -> None:
        intruder, self.intruder = self.intruder, None
        if intruder is not None:
            intruder()
        super().put_if_absent(key, data)


def busy_run() -> tuple[Busy, Log]:
    store = Busy()
    log = open_log(store)
    log.take_term("trainer")
    log.append(generation(1))
    log.append(commit(1, 10))
    log.append(commit(1, 20))
    return store, log


def collects(store: Store, *states: State) -> None:
    collector = Log(store)
    collector.append_if_last(retire(*states), collector.read().next_seq)


def test_a_generation_does_not_begin_at_what_was_retired_meanwhile() -> None:
    store, log = busy_run()
    store.intruder = lambda: collects(store, state(1, 10))
    with pytest.raises(NotRestorable, match=r"from step 10 of generation 1 .* retention"):
        log.append_from(state(1, 10), generation(2, state(1, 10)))
    assert [one.number for one in open_log(store).read().generations] == [1]


def test_a_generation_begins_after_what_does_not_concern_its_base() -> None:
    store, log = busy_run()
    store.intruder = lambda: collects(store, state(1, 10))
    made = log.append_from(state(1, 20), generation(2, state(1, 20)))
    assert made.seq == 5
    assert [one.number for one in open_log(store).read().generations] == [1, 2]
    log.append_from(None, generation(3))
    assert open_log(store).read().live == ()


def test_a_generation_begins_at_a_state_that_was_never_committed() -> None:
    """It lived in memory alone. After it, so does the next one: bases chain."""
    _, log = busy_run()
    log.append_from(state(1, 27), generation(2, state(1, 27)))
    log.append_from(state(2, 31), generation(3, state(2, 31)))
    log.append(commit(3, 32))
    lineage = log.read()
    assert lineage.ignored == ()
    assert [each.state for each in lineage.live] == [state(3, 32), state(1, 20), state(1, 10)]


@pytest.mark.parametrize("base", [state(1, 20), state(1, 25), state(2, 10), state(4, 1)])
def test_a_generation_does_not_begin_off_the_lineage(base: State) -> None:
    store, log = busy_run()
    log.append_from(state(1, 15), generation(2, state(1, 15)))
    with pytest.raises(NotRestorable, match=f"from step {base.step} of generation"):
        log.append_from(base, generation(3, base))
    assert len(open_log(store).read().generations) == 2


def test_a_base_in_memory_that_is_called_bad_meanwhile_is_refused() -> None:
    store, log = busy_run()

    def judges() -> None:
        judge = Log(store)
        judge.append_if_last(bad(1, 25), judge.read().next_seq)

    store.intruder = judges
    with pytest.raises(NotRestorable, match="descends from step 25 of generation 1, which is bad"):
        log.append_from(state(1, 27), generation(2, state(1, 27)))


def test_two_processes_write_under_one_term() -> None:
    store = MemoryStore()
    rank_0, keeper = open_log(store), open_log(store)
    term = rank_0.take_term("rank 0")
    rank_0.append(generation(1))
    keeper.continue_term(term)
    keeper.append(commit(1, 10))
    rank_0.append(good(1, 10))
    keeper.append(commit(1, 20))
    lineage = open_log(store).read()
    assert lineage.ignored == ()
    assert (lineage.term, lineage.term_by, lineage.next_seq) == (term, "rank 0", 5)
    assert [each.state.step for each in lineage.live] == [20, 10]


def test_who_continues_a_term_is_superseded_with_it() -> None:
    store = MemoryStore()
    rank_0, keeper = open_log(store), open_log(store)
    term = rank_0.take_term("rank 0")
    rank_0.append(generation(1))
    keeper.continue_term(term)
    open_log(store).take_term("somebody else")
    with pytest.raises(Superseded, match="somebody else took term 2"):
        keeper.append(commit(1, 10))
    with pytest.raises(Superseded, match="somebody else took term 2"):
        open_log(store).continue_term(term)
    assert open_log(store).read().live == ()


def test_a_term_that_nobody_took_cannot_be_continued() -> None:
    store = MemoryStore()
    begun(store)
    with pytest.raises(LogError, match="nobody has taken term 7"):
        open_log(store).continue_term(7)


def test_a_term_is_not_continued_where_names_are_not_kept_free() -> None:
    class Careless(MemoryStore):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(put_if_absent=False, durable=True)

    store = Careless()
    with pytest.raises(LogError, match="single_writer"):
        open_log(store).continue_term(1)

"""Two hosts and one store: who commits, who hears of it, and what an ended term commits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.logs import bad, generation, open_log
from tests.kit.shelved import JOB, Ear, Host, begin_generation, shelve, tenure_of
from tests.kit.slow_store import Gate, Outage

from keepstep.ckpt.document import encode
from keepstep.ckpt.drains import Drains
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import done_key, image_key, manifest_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import ImageRecord, State, done_record
from keepstep.ckpt.store_tier import read_done
from keepstep.ckpt.tiers import Due, TierPolicy
from keepstep.ckpt.verify import verify
from keepstep.storage.errors import NotFound
from keepstep.storage.file import FileStore
from keepstep.storage.store import Store

HOSTS = (0, 1)
CLOSE_S = 10.0


class Side:
    """One host: rank 0 is on host 0, which commits, and rank 1 on host 1."""

    def __init__(self, number: int, store: Store) -> None:
        self.number = number
        self.ear = Ear()
        self.host = Host()
        self.drains = Drains(
            lambda: store, None, self.host.shelf, self.ear, job=JOB, patience_s=0.4
        )

    def enter(
        self, generation_number: int = 1, term: int = 1, base: State | None = None, keep: int = 5
    ) -> None:
        policy = TierPolicy(keep=keep)
        self.drains.enter(
            tenure_of(
                generation_number,
                term=term,
                base=base,
                hosts=HOSTS,
                host=self.number,
                store=policy,
            )
        )

    def seal(self, state: State) -> None:
        self.host.seal(shelve(state, Due.STORE, ranks=(self.number,)), self.drains.sealed)


class Pair:
    """Both hosts on one store."""

    def __init__(self, directory: Path) -> None:
        self.store = FileStore(directory)
        begin_generation(self.store)
        self.made: list[Side] = []

    def side(self, number: int, store: Store | None = None) -> Side:
        made = Side(number, store or self.store)
        self.made.append(made)
        return made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for side in made.made:
        side.drains.close(0.0)


def at(step: int, generation_number: int = 1) -> State:
    return State(generation_number, step)


def live(store: Store) -> list[State]:
    return [each.state for each in Log(store).read().live]


def test_a_state_is_committed_when_the_last_host_is_done_and_all_hear_of_it(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    first.ear.wait_drained(0, 10)
    assert live(pair.store) == []
    assert first.drains.status()["lag_steps"] == 10
    second.seal(at(10))
    first.ear.wait_committed(at(10))
    second.ear.wait_committed(at(10))
    for side in (first, second):
        side.drains.close(CLOSE_S)
    assert live(pair.store) == [at(10)]
    assert Log(pair.store).read().term == 1, "the committer takes no term of its own"
    report = verify(pair.store, threads=1)
    assert (report.findings, report.unreferenced) == ((), ())
    assert second.ear.kinds() == []


def test_a_committer_started_anew_finds_what_others_did_meanwhile(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    first.ear.wait_drained(0, 10)
    first.drains.close(0.0)
    second.seal(at(10))
    second.ear.wait_drained(1, 10)
    again = pair.side(0)
    again.enter()
    again.seal(at(10))
    again.ear.wait_committed(at(10))
    second.ear.wait_committed(at(10))


def test_the_newer_state_that_is_complete_is_committed_and_the_older_never(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    for step in (10, 20):
        first.seal(at(step))
        first.ear.wait_drained(0, step)
    second.seal(at(20))
    first.ear.wait_committed(at(20))
    second.ear.wait_committed(at(20))
    second.seal(at(10))
    first.seal(at(30))
    second.seal(at(30))
    first.ear.wait_committed(at(30))
    first.drains.close(CLOSE_S)
    assert live(pair.store) == [at(30), at(20)]
    assert verify(pair.store, threads=1).unreferenced == (), "what was left of step 10 is gone"


def test_under_a_term_that_has_ended_nothing_is_committed(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    second.seal(at(10))
    first.ear.wait_committed(at(10))
    term = begin_generation(pair.store, 2, base=at(10))
    before = {info.key: pair.store.get(info.key, 1 << 20) for info in pair.store.list("log/")}
    first.seal(at(20))
    second.seal(at(20))
    first.ear.wait_event("superseded")
    assert f"took term {term}" in first.ear.reasons("superseded")[0]
    first.seal(at(30))
    second.seal(at(30))
    first.ear.wait_drained(0, 30)
    first.drains.close(1.0)
    after = {info.key: pair.store.get(info.key, 1 << 20) for info in pair.store.list("log/")}
    assert after == before
    assert live(pair.store) == [at(10)]
    assert first.ear.kinds().count("superseded") == 1


def test_a_keeper_goes_on_committing_in_the_next_generation(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    second.seal(at(10))
    first.ear.wait_committed(at(10))
    term = begin_generation(pair.store, 2, base=at(10))
    for side in (first, second):
        side.enter(2, term, at(10))
        side.seal(at(20, 2))
    first.ear.wait_committed(at(20, 2))
    second.ear.wait_committed(at(20, 2))
    assert live(pair.store) == [at(20, 2), at(10)]


def test_retention_goes_on_after_each_commit(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    for side in (first, second):
        side.enter(keep=2)
    for step in (10, 20, 30, 40):
        first.seal(at(step))
        second.seal(at(step))
        first.ear.wait_committed(at(step))
    first.drains.close(CLOSE_S)
    assert live(pair.store) == [at(40), at(30)]
    assert "retired" in first.ear.kinds()
    assert verify(pair.store, threads=1).unreferenced == ()


def test_a_damaged_done_record_is_told_and_commits_nothing(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    pair.store.put(done_key(at(10), 1), b"{}")
    first.seal(at(10))
    first.ear.wait_event("checkpoint_failed")
    assert "r00001.json" in first.ear.reasons("checkpoint_failed")[0]
    assert live(pair.store) == []
    pair.store.delete(done_key(at(10), 1))
    second.seal(at(10))
    first.ear.wait_committed(at(10))
    first.ear.wait_event("commit_recovered")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"rank":0,"size_bytes":10,"header_bytes":5,"digest":"%s"}' % (b"0" * 32),
        b'{"rank":1,"size_bytes":5,"header_bytes":5,"digest":"%s"}' % (b"0" * 32),
        b'{"rank":1,"size_bytes":10,"header_bytes":5,"digest":"zz"}',
        b'{"rank":1,"size_bytes":10,"header_bytes":5,"digest":"%s","x":1}' % (b"0" * 32),
    ],
)
def test_a_done_record_is_checked(pair: Pair, data: bytes) -> None:
    pair.store.put(done_key(at(10), 1), data)
    with pytest.raises(FormatError, match=r"r00001\.json"):
        read_done(pair.store, at(10), 1)


def test_a_done_record_is_read_back(pair: Pair) -> None:
    with pytest.raises(NotFound):
        read_done(pair.store, at(10), 1)
    record = ImageRecord(rank=1, size_bytes=5_000, header_bytes=4_096, digest="0" * 32)
    pair.store.put(done_key(at(10), 1), encode(record))
    assert read_done(pair.store, at(10), 1) == done_record(record)


def test_an_image_that_has_gone_again_makes_no_commit(pair: Pair) -> None:
    gate = Gate(pair.store, "list", "states/g000001/s000000000010")
    first, second = pair.side(0, gate), pair.side(1)
    gate.opened.set()
    first.enter()
    second.enter()
    first.seal(at(10))
    first.ear.wait_drained(0, 10)
    gate.opened.clear()
    gate.entered.clear()
    second.seal(at(10))
    second.ear.wait_drained(1, 10)
    assert gate.entered.wait(20)
    pair.store.delete(image_key(at(10), 1))
    gate.opened.set()
    first.ear.wait_event("checkpoint_failed")
    assert "r00001.safetensors (rank 1) is missing" in first.ear.reasons("checkpoint_failed")[0]
    assert live(pair.store) == []
    assert first.drains.close(CLOSE_S) is None


def test_a_log_that_cannot_be_written_for_a_while_is_written_then(pair: Pair) -> None:
    store = Outage(pair.store)
    store.is_out = False
    first, second = pair.side(0, store), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    first.ear.wait_drained(0, 10)
    store.is_out = True
    second.seal(at(10))
    first.ear.wait_event("checkpoint_failed")
    assert live(pair.store) == []
    store.is_out = False
    first.ear.wait_committed(at(10))
    assert live(pair.store) == [at(10)]


@pytest.mark.parametrize("action", [Action.LOSE_ANSWER, Action.FAIL])
def test_no_lost_answer_to_any_call_doubles_or_loses_a_commit(
    pair: Pair, action: Action, tmp_path: Path
) -> None:
    """Each call of the committing host is struck in turn."""
    first, second = pair.side(0), pair.side(1)
    second.enter()
    watched = FaultyStore(pair.store)
    first = pair.side(0, watched)
    first.enter()
    first.seal(at(1))
    second.seal(at(1))
    first.ear.wait_committed(at(1))
    first.drains.close(CLOSE_S)
    for number in range(2, len(watched.calls) + 2):
        struck = FaultyStore(pair.store, Fault(action, number - 2))
        side = pair.side(0, struck)
        side.enter()
        side.seal(at(number))
        second.seal(at(number))
        side.ear.wait_committed(at(number))
        side.drains.close(CLOSE_S)
    second.drains.close(CLOSE_S)
    lineage = Log(pair.store).read()
    assert lineage.ignored == ()
    steps = [each.state.step for each in reversed(lineage.commits)]
    assert steps == list(range(1, len(watched.calls) + 2))
    assert len(lineage.live) == 5
    assert verify(pair.store, threads=1).findings == ()


def test_a_state_that_is_bad_already_is_no_checkpoint_and_that_is_told(pair: Pair) -> None:
    log = open_log(pair.store)
    log.continue_term(1)
    log.append(bad(1, 10))
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    second.seal(at(10))
    first.ear.wait_event("checkpoint_failed")
    assert live(pair.store) == []
    assert watched_steps(first) == [], "it is not tried again"


def watched_steps(side: Side) -> object:
    commit = side.drains.status()["commit"]
    assert isinstance(commit, dict)
    return commit["waiting_steps"]


def test_commits_of_an_older_generation_are_not_heard_as_own(pair: Pair) -> None:
    first, second = pair.side(0), pair.side(1)
    first.enter()
    second.enter()
    first.seal(at(10))
    second.seal(at(10))
    first.ear.wait_committed(at(10))
    first.drains.close(CLOSE_S)
    log = open_log(pair.store)
    term = log.take_term("rank 0")
    log.append(generation(2, base=at(10)))
    anew = pair.side(0)
    anew.enter(2, term, at(10))
    anew.seal(at(11, 2))
    second.enter(2, term, at(10))
    second.seal(at(11, 2))
    anew.ear.wait_committed(at(11, 2))
    assert anew.ear.commits == [at(11, 2)]
    assert pair.store.get(manifest_key(at(10)), 1 << 20)

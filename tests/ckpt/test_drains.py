"""Drains with real stores: what reaches the disk and the store, and when slots are free."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.kit.drain_bench import (
    CLOSE_S,
    PATIENCE_S,
    Bench,
    at,
    is_there,
    opened,
    same,
    steps_on,
)
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.shelved import (
    JOB,
    READ_BYTES_MAX,
    Ear,
    begin_generation,
    shelve,
    tenure_of,
)
from tests.kit.slow_store import Gate, Outage

from keepstep.ckpt.disk_tier import DiskTier, to_drop
from keepstep.ckpt.drain_jobs import Jobs
from keepstep.ckpt.drains import Drains
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import description_key, done_key, image_key, manifest_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.tiers import Due, TierPolicy
from keepstep.ckpt.verify import verify
from keepstep.storage.errors import Denied, NoSpace, StoreError, Transient
from keepstep.storage.store import Buffer, Store


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as made:
        yield made


def test_an_image_goes_to_the_disk_and_to_the_store_and_is_committed(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of())
    images = shelve(at(10))
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_committed(at(10))
    for shelved in images:
        assert same(bench.disk, shelved)
        assert same(bench.store, shelved)
        bench.ear.wait_drained(shelved.rank, 10)
    assert is_there(bench.disk, description_key(at(10)))
    assert not is_there(bench.store, description_key(at(10)))
    drains.close(CLOSE_S)
    assert not is_there(bench.store, done_key(at(10), 0)), "done records go after the commit"
    report = verify(bench.store, threads=1)
    assert (report.findings, report.unreferenced) == ((), ())
    assert [each.state for each in Log(bench.store).read().live] == [at(10)]
    assert [kind for kind in bench.ear.kinds() if kind != "disk_slow"] == ["checkpoint_committed"]


def test_without_a_disk_it_goes_to_the_store_from_memory(bench: Bench) -> None:
    drains = bench.drains(has_disk=False)
    drains.enter(tenure_of())
    images = shelve(at(10), Due.STORE)
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_committed(at(10))
    assert all(same(bench.store, shelved) for shelved in images)
    assert list(bench.disk.list("")) == []
    bench.ear.wait_drained(0, 10)
    bench.ear.wait_drained(1, 10)


def test_what_is_due_nowhere_goes_nowhere(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(9), Due.NOWHERE), drains.sealed)
    bench.host.seal(shelve(at(10), Due.DISK), drains.sealed)
    bench.ear.wait_drained(1, 10)
    drains.close(CLOSE_S)
    assert steps_on(bench.disk) == {10}
    assert steps_on(bench.store) == set()
    assert bench.ear.commits == []


def test_what_is_due_on_a_disk_that_is_not_there_needs_no_slot(bench: Bench) -> None:
    drains = bench.drains(has_disk=False)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10), Due.DISK), drains.sealed)
    bench.ear.wait_drained(0, 10)
    bench.ear.wait_drained(1, 10)


def test_a_store_that_takes_a_minute_holds_no_slot_where_there_is_a_disk(bench: Bench) -> None:
    slow = Gate(bench.store, "put_stream")
    drains = bench.drains(store=slow)
    drains.enter(tenure_of())
    for step in (10, 20, 30):
        bench.host.seal(shelve(at(step)), drains.sealed)
        bench.ear.wait_drained(0, step)
        bench.ear.wait_drained(1, step)
    assert slow.entered.wait(60)
    status = drains.status()
    assert status["lag_steps"] == 30
    assert status["store"] == {"waiting_steps": [10, 20, 30], "tries_failed": 0, "failing_s": 0.0}
    slow.opened.set()
    bench.ear.wait_committed(at(10))
    bench.ear.wait_committed(at(30))
    assert bench.ear.commits == [at(10), at(30)]
    assert (
        "step 20 of generation 1 does not go to the store"
        in bench.ear.reasons("drain_superseded")[0]
    )
    assert drains.status()["lag_steps"] == 0


def test_without_a_disk_a_slow_store_keeps_the_slot(bench: Bench) -> None:
    slow = Gate(bench.store, "put_stream")
    drains = bench.drains(store=slow, has_disk=False)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10), Due.STORE), drains.sealed)
    assert slow.entered.wait(60)
    assert bench.ear.drained_steps == {}
    slow.opened.set()
    bench.ear.wait_drained(0, 10)


@pytest.mark.parametrize("kind", [Transient, NoSpace, Denied])
def test_a_store_that_fails_for_a_while_is_tried_until_it_works(
    bench: Bench, kind: type[StoreError]
) -> None:
    store = Outage(bench.store, kind)
    drains = bench.drains(store=store)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10)), drains.sealed)
    bench.ear.wait_drained(0, 10)
    bench.ear.wait_drained(1, 10)
    bench.ear.wait_event("drain_failed", 2)
    bench.ear.wait_event("checkpoint_failed")
    assert bench.ear.failures >= 2
    assert bench.ear.commits == []
    bench.host.seal(shelve(at(20)), drains.sealed)
    bench.ear.wait_drained(0, 20)
    store.is_out = False
    bench.ear.wait_committed(at(20))
    bench.ear.wait_event("drain_recovered")
    drains.close(CLOSE_S)
    assert verify(bench.store, threads=1).findings == ()


def test_a_store_that_cannot_even_be_opened_is_tried_again(bench: Bench) -> None:
    tries = 0

    def open_store() -> Store:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise Denied("credentials have expired")
        return bench.store

    drains = Drains(open_store, None, bench.shelf, bench.ear, job=JOB, patience_s=PATIENCE_S)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10), Due.STORE), drains.sealed)
    bench.ear.wait_committed(at(10))
    drains.close(CLOSE_S)
    assert "credentials have expired" in str(bench.ear.events)


def test_a_slot_is_given_up_when_the_store_has_failed_for_long(bench: Bench) -> None:
    store = Outage(bench.store)
    drains = bench.drains(store=store, has_disk=False)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10), Due.STORE), drains.sealed)
    bench.ear.wait_event("drain_failed")
    assert bench.ear.drained_steps == {}
    bench.ear.wait_event("drain_gave_up")
    bench.ear.wait_drained(0, 10)
    bench.ear.wait_drained(1, 10)
    store.is_out = False
    bench.ear.wait_committed(at(10))


def test_what_was_written_over_after_its_slot_was_given_up_is_not_committed(bench: Bench) -> None:
    store = Outage(bench.store)
    gate = Gate(store, "put_stream", "r00000")
    drains = bench.drains(store=gate, has_disk=False)
    drains.enter(tenure_of())
    images = shelve(at(10), Due.STORE)
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_event("drain_gave_up")
    store.is_out = False
    assert gate.entered.wait(60)
    images[0].view[-1] ^= 1
    gate.opened.set()
    bench.ear.wait_event("corrupt")
    assert bench.ear.commits == []
    assert not is_there(bench.store, done_key(at(10), 0))
    bench.host.seal(shelve(at(20), Due.STORE), drains.sealed)
    bench.ear.wait_committed(at(20))


def test_what_is_written_over_while_it_is_sent_is_not_committed(bench: Bench) -> None:
    """Its slot was given up. What was sent passed the check, and then memory is found changed."""

    class WrittenOver(Outage):
        def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
            super().put_stream(key, chunks, size_bytes)
            if key == image_key(at(10), 0):
                images[0].view[-1] ^= 1

    store = WrittenOver(bench.store)
    drains = bench.drains(store=store, has_disk=False)
    drains.enter(tenure_of())
    images = shelve(at(10), Due.STORE)
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_event("drain_gave_up")
    store.is_out = False
    bench.ear.wait_event("corrupt")
    drains.close(1.0)
    assert bench.ear.commits == []
    assert not is_there(bench.store, done_key(at(10), 0))


def test_a_disk_that_fails_for_long_is_passed_over(bench: Bench) -> None:
    disk = Outage(bench.disk, NoSpace)
    drains = bench.drains(disk=disk)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10)), drains.sealed)
    bench.ear.wait_event("drain_gave_up")
    bench.ear.wait_committed(at(10))
    assert "drain_recovered" not in bench.ear.kinds()
    bench.ear.wait_drained(0, 10)
    disk.is_out = False
    bench.host.seal(shelve(at(20)), drains.sealed)
    bench.ear.wait_committed(at(20))
    bench.ear.wait_event("drain_recovered")
    assert steps_on(bench.disk) == {20}


def test_a_bad_disk_holds_no_state_for_a_patience(bench: Bench) -> None:
    """A run waits one patience at its end: it would fail over a disk that it can do without."""
    drains = bench.drains(disk=Outage(bench.disk, NoSpace), patience_s=6.0)
    drains.enter(tenure_of())
    for step in (10, 20):
        began_s = time.monotonic()
        bench.host.seal(shelve(at(step)), drains.sealed)
        bench.ear.wait_drained(0, step)
        bench.ear.wait_committed(at(step))
        assert time.monotonic() - began_s < 6.0


def test_damage_in_memory_gets_nowhere_and_is_named(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of())
    images = shelve(at(10))
    images[1].view[-1] ^= 1
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_event("corrupt")
    bench.ear.wait_drained(1, 10)
    _, _, details = next(each for each in bench.ear.events if each[0] == "corrupt")
    assert (details["rank"], details["tier"], details["step"]) == (1, "memory", 10)
    assert details["tensor"] in images[1].header.items
    assert details["offset"] == images[1].header.header_bytes
    assert not is_there(bench.disk, image_key(at(10), 1))
    drains.close(0.2)
    assert bench.ear.commits == []


def test_a_damaged_disk_copy_is_found_and_memory_is_used(bench: Bench) -> None:
    gate = Gate(bench.store, "list")
    drains = bench.drains(store=gate)
    drains.enter(tenure_of())
    images = shelve(at(10))
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_drained(0, 10)
    key = image_key(at(10), 0)
    data = bytearray(bench.disk.get(key, READ_BYTES_MAX))
    data[-1] ^= 1
    bench.disk.put(key, bytes(data))
    gate.opened.set()
    bench.ear.wait_committed(at(10))
    assert next(each[2]["tier"] for each in bench.ear.events if each[0] == "corrupt") == "disk"
    assert same(bench.store, images[0])


def test_with_the_disk_copy_damaged_and_memory_gone_nothing_is_committed(bench: Bench) -> None:
    gate = Gate(bench.store, "list")
    drains = bench.drains(store=gate)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10)), drains.sealed)
    bench.ear.wait_drained(0, 10)
    bench.shelf.remove(at(10), 0)
    key = image_key(at(10), 0)
    bench.disk.put(key, bench.disk.get(key, READ_BYTES_MAX)[:-1] + b"!")
    gate.opened.set()
    bench.ear.wait_event("drain_lost")
    assert bench.ear.commits == []
    bench.host.seal(shelve(at(20)), drains.sealed)
    bench.ear.wait_committed(at(20))


def test_the_disk_keeps_as_many_as_its_policy_says(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of(disk=TierPolicy(keep=2, keep_every=30)))
    for step in (10, 20, 30, 40, 50, 60):
        bench.host.seal(shelve(at(step), Due.DISK), drains.sealed)
        bench.ear.wait_drained(0, step)
        bench.ear.wait_drained(1, step)
    drains.close(CLOSE_S)
    assert steps_on(bench.disk) == {30, 50, 60}


def test_what_waits_for_the_store_stays_on_the_disk(bench: Bench) -> None:
    gate = Gate(bench.store, "list", "g000001")
    drains = bench.drains(store=gate)
    drains.enter(tenure_of(disk=TierPolicy(keep=1)))
    bench.host.seal(shelve(at(10)), drains.sealed)
    assert gate.entered.wait(60)
    for step in (20, 30):
        bench.host.seal(shelve(at(step), Due.DISK), drains.sealed)
        bench.ear.wait_drained(0, step)
        bench.ear.wait_drained(1, step)
    gate.opened.set()
    bench.ear.wait_committed(at(10))
    assert steps_on(bench.disk) >= {10, 30}
    bench.host.seal(shelve(at(40), Due.DISK), drains.sealed)
    bench.ear.wait_drained(1, 40)
    drains.close(CLOSE_S)
    assert steps_on(bench.disk) == {40}


def test_what_was_promised_stays_until_the_next_generation_has_begun(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of(disk=TierPolicy(keep=1)))
    bench.host.seal(shelve(at(10), Due.DISK), drains.sealed)
    bench.ear.wait_drained(1, 10)
    drains.promised(2)
    for step in (20, 30):  # what goes for 20 has gone when 30 begins
        bench.host.seal(shelve(at(step), Due.DISK), drains.sealed)
        bench.ear.wait_drained(1, step)
        bench.ear.wait_drained(0, step)
    assert steps_on(bench.disk) == {10, 20, 30}
    drains.enter(tenure_of(2, base=at(15), disk=TierPolicy(keep=1)))
    bench.host.seal(shelve(at(16, 2), Due.DISK), drains.sealed)
    bench.ear.wait_drained(1, 16)
    drains.close(CLOSE_S)
    assert steps_on(bench.disk) == {16}


def test_states_of_an_older_generation_never_go_to_the_store(bench: Bench) -> None:
    gate = Gate(bench.store, "put_stream")
    drains = bench.drains(store=gate)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10)), drains.sealed)
    assert gate.entered.wait(60)
    bench.host.seal(shelve(at(20)), drains.sealed)
    bench.ear.wait_drained(1, 20)
    term = begin_generation(bench.store, 2, base=at(10))
    drains.enter(tenure_of(2, term=term, base=at(10)))
    bench.host.seal(shelve(at(15)), drains.sealed)  # adopted
    waiting = drains.status()["store"]
    assert isinstance(waiting, dict)
    assert waiting["waiting_steps"] == [10], "and that had begun"
    gate.opened.set()
    bench.host.seal(shelve(at(20, 2)), drains.sealed)
    bench.ear.wait_committed(at(20, 2))
    drains.close(CLOSE_S)
    assert bench.ear.commits == [at(20, 2)]
    assert "/g000001/s000000000020" not in str(list(bench.store.list("")))
    assert verify(bench.store, threads=1).unreferenced == ()
    assert 15 in steps_on(bench.disk) or 20 in steps_on(bench.disk)


def test_a_keeper_started_anew_does_not_upload_again(bench: Bench) -> None:
    """Before the commit: its predecessor had uploaded the one image, and not the other."""
    images = shelve(at(10), Due.STORE)
    first = bench.drains(has_disk=False)
    first.enter(tenure_of())
    bench.host.seal(images[:1], first.sealed)
    bench.ear.wait_drained(0, 10)
    first.close(0.0)
    watched = FaultyStore(bench.store)
    second = bench.drains(store=watched, has_disk=False)
    second.enter(tenure_of())
    bench.host.seal(images, second.sealed)
    bench.ear.wait_committed(at(10))
    puts = [key for operation, key in watched.calls if operation == "put_stream"]
    assert puts == [image_key(at(10), 1)]


def test_a_keeper_started_anew_after_the_commit_does_nothing(bench: Bench) -> None:
    images = shelve(at(10), Due.STORE)
    first = bench.drains(has_disk=False)
    first.enter(tenure_of())
    bench.host.seal(images, first.sealed)
    bench.ear.wait_committed(at(10))
    first.close(CLOSE_S)
    watched = FaultyStore(bench.store)
    bench.ear.drained_steps.clear()
    bench.ear.commits.clear()
    second = bench.drains(store=watched, has_disk=False)
    second.enter(tenure_of())
    bench.host.seal(images, second.sealed)
    bench.ear.wait_drained(0, 10)
    bench.ear.wait_drained(1, 10)
    bench.ear.wait_committed(at(10))
    second.close(CLOSE_S)
    assert [call for call in watched.calls if call[0].startswith("put")] == []
    assert len(Log(bench.store).read().commits) == 1


def test_another_images_done_record_is_an_error_and_not_overwritten(bench: Bench) -> None:
    images = shelve(at(10), Due.STORE)
    other = replace(images[0], record=shelve(at(11))[0].record)
    first = bench.drains(has_disk=False)
    first.enter(tenure_of())
    bench.host.seal(images[:1], first.sealed)
    bench.ear.wait_drained(0, 10)
    first.close(0.0)
    bench.shelf.remove(at(10), 0)
    second = bench.drains(has_disk=False)
    second.enter(tenure_of())
    bench.host.seal([other], second.sealed)
    bench.ear.wait_event("drain_lost")
    assert same(bench.store, images[0])


def test_the_disk_says_what_it_has(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of())
    images = shelve(at(10), Due.DISK)
    bench.host.seal(images, drains.sealed)
    bench.ear.wait_drained(0, 10)
    bench.ear.wait_drained(1, 10)
    tier = DiskTier(bench.disk)
    copies, wrong = tier.copies()
    assert wrong == []
    assert [(copy.state, copy.record) for copy in copies] == [
        (shelved.state, shelved.record) for shelved in images
    ]
    assert {copy.plan_digest for copy in copies} == {images[0].structure.digest}
    assert tier.describe(at(10)) == images[0].description()
    bench.disk.put(image_key(at(10), 0), b"no image")
    bench.disk.put(description_key(at(10)), b"{}")
    copies, wrong = tier.copies()
    assert [copy.record.rank for copy in copies] == [1]
    assert len(wrong) == 1
    with pytest.raises(FormatError):
        tier.describe(at(10))
    bench.disk.delete(description_key(at(10)))
    assert tier.copies() == ([], [])


def test_closing_finishes_what_is_due_and_is_bounded(bench: Bench) -> None:
    drains = bench.drains()
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10)), drains.sealed)
    drains.close(CLOSE_S)
    assert is_there(bench.store, manifest_key(at(10)))
    assert bench.ear.commits == [at(10)]
    store = Outage(bench.store)
    stuck = bench.drains(store=store)
    stuck.enter(tenure_of())
    bench.host.seal(shelve(at(20)), stuck.sealed)
    began_s = time.monotonic()
    stuck.close(0.5)
    assert time.monotonic() - began_s < 30


def test_a_lost_answer_is_uploaded_again_and_committed_once(bench: Bench) -> None:
    for number, operation in enumerate(("put_stream", "put", "put_if_absent", "list"), 1):
        store = FaultyStore(
            bench.store, Fault(Action.LOSE_ANSWER, 0, operations=frozenset({operation}))
        )
        drains = bench.drains(store=store, has_disk=False)
        drains.enter(tenure_of())
        bench.host.seal(shelve(at(10 * number), Due.STORE), drains.sealed)
        bench.ear.wait_committed(at(10 * number))
        drains.close(CLOSE_S)
    assert len(Log(bench.store).read().live) == 4
    assert Log(bench.store).read().ignored == ()


def test_slots_are_told_free_up_to_the_oldest_that_is_needed() -> None:
    ear = Ear()
    jobs = Jobs(ear)
    jobs.enter(tenure_of())
    tickets = [jobs.add(shelve(at(step))[0], Due.STORE) for step in (10, 20, 30)]
    older = jobs.add(shelve(at(40, 0))[0], Due.DISK)
    assert None not in tickets
    assert jobs.add(shelve(at(10))[0], Due.STORE) is None
    for ticket, told in zip(
        [tickets[1], older, tickets[0], tickets[2]], [[], [], [20], [20, 30]], strict=True
    ):
        assert ticket is not None
        jobs.release(ticket)
        jobs.end(ticket)
        assert ear.drained_steps.get(0, []) == told
    assert jobs.levels() == {0: 30}


@pytest.mark.parametrize(("hosts", "going"), [((0, 0), [10, 20]), ((0, 1), [10])])
def test_where_there_are_other_hosts_their_disks_may_lag_a_state_behind(
    hosts: tuple[int, int], going: list[int]
) -> None:
    """Else, when all memory is lost at once, no state would be on the disks of all."""
    policy = TierPolicy(keep=1)
    tenure = tenure_of(hosts=hosts, disk=policy)
    present = {at(step): set(tenure.ranks) for step in (10, 20, 30)}
    dropped = to_drop(present, tenure, tenure.ranks, policy, ())
    assert [state.step for state in dropped] == going

"""A keeper that dies anywhere in its drains leaves the old commit or the new one, and more.

What dies is all of it, at once, at any call to the store. A keeper that is started anew in the same
generation finishes what its predecessor left; and so does the next run without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.kit.crash_drain import drain_save
from tests.kit.crash_save import (
    BIGGER,
    NEW,
    OLD,
    POLICY,
    expected_files,
    faults_found,
    faults_going_on,
    prepare,
)
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.posixes import ThreadedPosix, UnsyncedPosix
from tests.kit.powerloss import disk_states
from tests.kit.shelved import JOB, Ear, Host, shelve, tenure_of
from tests.prove.crash import drained, power_loss

from keepstep.ckpt.checked_stream import MemoryStream
from keepstep.ckpt.disk_tier import DiskTier
from keepstep.ckpt.drains import Drains
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.tiers import Due, TierPolicy
from keepstep.storage.errors import (
    Denied,
    NoSpace,
    OutcomeUnknown,
    Permanent,
    StoreError,
    Transient,
)
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

EXPECTED = expected_files()
CLOSE_S = 20.0


def calls_of_a_save() -> list[tuple[str, str]]:
    store = MemoryStore()
    prepare(store)
    watched = FaultyStore(store)
    drain_save(watched)
    return watched.calls


CALLS = calls_of_a_save()
WRITE_CALLS = [call for call in CALLS if call[0] in WRITES]


def test_a_save_makes_the_calls_that_the_sweep_is_about() -> None:
    names = [name for name, _ in WRITE_CALLS]
    assert names.count("put_stream") == 2  # two images
    assert names.count("put") == 3  # two done records and a manifest
    assert names.count("put_if_absent") == 4  # term, generation, commit, retire
    assert names.count("delete") == 5  # two done records; of the oldest state, three files


def memory_store(directory: Path) -> Store:
    return MemoryStore()


def file_store(directory: Path) -> Store:
    (directory / "store").mkdir()
    return FileStore(directory / "store", posix=UnsyncedPosix())


def struck(inner: Store, fault: Fault) -> bool:
    """Save with a fault. Whether the commit was acknowledged."""
    prepare(inner)
    acknowledged: list[bool] = []
    store = FaultyStore(inner, fault)
    with contextlib.suppress(Crashed, StoreError):
        drain_save(store, lambda: acknowledged.append(True), is_dead=lambda: store.is_dead)
    return bool(acknowledged)


def go_on_in_the_same_generation(store: Store) -> None:
    """What a successor on the same host does: it adopts the images, and drains what is left."""
    lineage = Log(store).read()
    newest = lineage.generation
    if newest is None or newest.number != NEW.generation:
        return  # nobody had entered it
    ear, host = Ear(), Host()
    drains = Drains(lambda: store, None, host.shelf, ear, job=JOB, patience_s=0.2)
    policy = TierPolicy(keep=POLICY.keep_last)
    drains.enter(tenure_of(NEW.generation, term=lineage.term, base=OLD, store=policy))
    host.seal(shelve(NEW, Due.STORE), drains.sealed)
    ear.wait_committed(NEW)
    drains.close(CLOSE_S)


@pytest.mark.parametrize("make", [memory_store, file_store])
@pytest.mark.parametrize("action", [Action.CRASH_BEFORE, Action.CRASH_AFTER])
def test_killed_at_any_call_old_or_new_and_the_next_run_goes_on(
    tmp_path: Path, action: Action, make: Callable[[Path], Store]
) -> None:
    for at, call in enumerate(CALLS):
        directory = tmp_path / str(at)
        directory.mkdir()
        inner = make(directory)
        acknowledged = struck(inner, Fault(action, at))
        assert faults_found(inner, acknowledged, EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


@pytest.mark.parametrize("action", [Action.CRASH_BEFORE, Action.CRASH_AFTER])
def test_killed_at_any_call_its_successor_commits_the_same_state(action: Action) -> None:
    for at, call in enumerate(CALLS):
        inner = MemoryStore()
        struck(inner, Fault(action, at))
        go_on_in_the_same_generation(inner)
        newest = Log(inner).read().generation
        is_new = newest is not None and newest.number == NEW.generation
        assert faults_found(inner, is_new, EXPECTED) == [], call
        assert Log(inner).read().ignored == (), call
        assert faults_going_on(inner) == [], call


@pytest.mark.parametrize("kind", [NoSpace, Denied, Permanent, Transient, OutcomeUnknown])
@pytest.mark.parametrize("action", [Action.FAIL, Action.LOSE_ANSWER])
def test_refused_or_unclear_at_any_write_it_is_committed_all_the_same(
    action: Action, kind: type[StoreError]
) -> None:
    for at, call in enumerate(WRITE_CALLS):
        if at < 2:
            continue  # term and generation are the ranks' to append
        inner = MemoryStore()
        acknowledged = struck(inner, Fault(action, at, operations=WRITES, error=kind, errno=28))
        assert acknowledged, call
        assert faults_found(inner, acknowledged, EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


def test_after_a_power_loss_old_or_new_and_the_next_run_goes_on(tmp_path: Path) -> None:
    figures = power_loss(tmp_path, seed=5, act=drained, posix_class=ThreadedPosix)
    assert figures.wrong == []
    assert figures.tried > 40
    assert figures.old > 0
    assert figures.new > 0


@pytest.mark.slow
def test_after_a_power_loss_in_a_bigger_save_too(tmp_path: Path) -> None:
    figures = power_loss(
        tmp_path, seed=6, tensors=BIGGER, every=8, act=drained, posix_class=ThreadedPosix
    )
    assert figures.wrong == []
    assert figures.states > 200  # how many depends on which thread's writes are not synced


class NoSync(ThreadedPosix):
    """Never fsyncs."""

    def fsync(self, fd: int) -> None:
        pass


def test_a_save_without_fsync_is_caught(tmp_path: Path) -> None:
    figures = power_loss(tmp_path, seed=5, every=60, act=drained, posix_class=NoSync)
    assert figures.wrong != []


def test_after_a_power_loss_what_the_disk_has_is_whole(tmp_path: Path) -> None:
    """And what was drained is there: the newest state, and with it the one before."""
    root = tmp_path / "recorded"
    root.mkdir()
    posix = ThreadedPosix(root)
    disk = FileStore(root, posix=posix)
    ear, host = Ear(), Host()
    drains = Drains(lambda: MemoryStore(), lambda: disk, host.shelf, ear, job=JOB, patience_s=0.2)
    drains.enter(tenure_of(disk=TierPolicy(keep=1)))
    for step in (10, 20):
        host.seal(shelve(State(1, step), Due.DISK), drains.sealed)
        ear.wait_drained(0, step)
        ear.wait_drained(1, step)
        posix.mark(f"{step}")
    drains.close(CLOSE_S)
    seen = 0
    for number, state in enumerate(disk_states(posix, seed=1)):
        seen += 1
        place = tmp_path / f"disk{number}"
        state.write_to(place)
        tier = DiskTier(FileStore(place))
        copies, wrong = tier.copies()
        assert wrong == []
        for copy in copies:
            assert tier.describe(copy.state).state == copy.state
            data = tier.store.get(image_key(copy.state, copy.record.rank), 1 << 24)
            header = parse(data[: copy.record.header_bytes], "image", len(data))
            with ThreadPoolExecutor(1) as pool:
                stream = MemoryStream(memoryview(data), header, copy.record, "image", pool)
                stream.verify()
        ranks: dict[int, set[int]] = {}
        for copy in copies:
            ranks.setdefault(copy.state.step, set()).add(copy.record.rank)
        whole = [step for step, held in ranks.items() if held == {0, 1}]
        assert max(whole, default=-1) >= int(state.marks[-1] if state.marks else -1)
    assert seen > 20

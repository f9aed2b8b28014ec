"""A save that dies anywhere leaves the old commit or the new one, and the next run goes on."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.checkpoints import write_images
from tests.kit.crash_save import (
    BIGGER,
    NEW,
    expected_files,
    faults_found,
    faults_going_on,
    prepare,
    save,
)
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.logs import commit as commit_entry
from tests.kit.logs import open_log
from tests.kit.posixes import InterleavedPosix, UnsyncedPosix
from tests.prove.crash import at_once, power_loss

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


def calls_of_a_save() -> list[tuple[str, str]]:
    store = MemoryStore()
    prepare(store)
    watched = FaultyStore(store)
    save(watched)
    return watched.calls


CALLS = calls_of_a_save()
WRITE_CALLS = [call for call in CALLS if call[0] in WRITES]


def memory_store(directory: Path) -> Store:
    return MemoryStore()


def file_store(directory: Path) -> Store:
    (directory / "store").mkdir()
    return FileStore(directory / "store", posix=UnsyncedPosix())


def struck(
    inner: Store, fault: Fault, act: Callable[[Store, Callable[[], None]], None]
) -> tuple[bool, BaseException | None]:
    """Save with a fault. Whether the commit was acknowledged, and what came of it."""
    prepare(inner)
    acknowledged: list[bool] = []
    try:
        act(FaultyStore(inner, fault), lambda: acknowledged.append(True))
    except (Crashed, StoreError) as error:
        return bool(acknowledged), error
    return bool(acknowledged), None


def test_a_save_makes_the_calls_that_the_sweep_is_about() -> None:
    names = [name for name, _ in WRITE_CALLS]
    assert names.count("put") == 3  # two images and a manifest
    assert names.count("put_if_absent") == 4  # term, generation, commit, retire
    assert names.count("delete") == 3  # of the oldest state: a manifest and two images


@pytest.mark.parametrize("make", [memory_store, file_store])
@pytest.mark.parametrize("action", [Action.CRASH_BEFORE, Action.CRASH_AFTER])
def test_killed_at_any_call_old_or_new_and_the_next_run_goes_on(
    tmp_path: Path, action: Action, make: Callable[[Path], Store]
) -> None:
    for at, call in enumerate(CALLS):
        directory = tmp_path / str(at)
        directory.mkdir()
        inner = make(directory)
        acknowledged, error = struck(inner, Fault(action, at), save)
        assert isinstance(error, Crashed), call
        assert faults_found(inner, acknowledged, EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


@pytest.mark.parametrize("kind", [NoSpace, Denied, Permanent])
def test_refused_at_any_write_old_or_new_and_the_next_run_goes_on(
    kind: type[StoreError],
) -> None:
    for at, call in enumerate(WRITE_CALLS):
        inner = MemoryStore()
        fault = Fault(Action.FAIL, at, operations=WRITES, error=kind, errno=28)
        acknowledged, error = struck(inner, fault, save)
        assert type(error) is kind, call
        assert error.errno == 28
        assert faults_found(inner, acknowledged, EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


@pytest.mark.parametrize("kind", [OutcomeUnknown, Transient])
@pytest.mark.parametrize("action", [Action.LOSE_ANSWER, Action.FAIL])
def test_unclear_at_any_write_old_or_new_and_the_next_run_goes_on(
    action: Action, kind: type[StoreError]
) -> None:
    for at, call in enumerate(WRITE_CALLS):
        inner = MemoryStore()
        acknowledged, error = struck(inner, Fault(action, at, operations=WRITES, error=kind), save)
        if call[0] == "put_if_absent":
            assert error is None, "an append is tried again until it is known"
        assert faults_found(inner, acknowledged, EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


def test_a_save_that_commits_too_early_is_caught() -> None:
    def hasty(store: Store, on_committed: Callable[[], None]) -> None:
        log = open_log(store)
        log.take_term("hasty")
        log.append(commit_entry(1, NEW.step))
        write_images(store, NEW)

    wrong = []
    for at in range(len(CALLS)):
        inner = MemoryStore()
        acknowledged, _ = struck(inner, Fault(Action.CRASH_AFTER, at), hasty)
        wrong += faults_found(inner, acknowledged, EXPECTED)
    assert wrong


def test_after_a_power_loss_old_or_new_and_the_next_run_goes_on(tmp_path: Path) -> None:
    figures = power_loss(tmp_path, seed=5, act=at_once, posix_class=InterleavedPosix)
    assert figures.wrong == []
    assert figures.tried > 40
    assert figures.old > 0
    assert figures.new > 0


@pytest.mark.slow
def test_after_a_power_loss_in_a_bigger_save_too(tmp_path: Path) -> None:
    figures = power_loss(
        tmp_path, seed=6, tensors=BIGGER, every=8, act=at_once, posix_class=InterleavedPosix
    )
    assert figures.wrong == []
    assert figures.states > 500


class NoSync(InterleavedPosix):
    """Never fsyncs."""

    def fsync(self, fd: int) -> None:
        pass


class NoDirectorySync(InterleavedPosix):
    """Fsyncs files only."""

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


@pytest.mark.parametrize("posix_class", [NoSync, NoDirectorySync])
def test_a_save_without_fsync_is_caught(
    tmp_path: Path, posix_class: type[InterleavedPosix]
) -> None:
    assert power_loss(tmp_path, seed=5, every=60, act=at_once, posix_class=posix_class).wrong != []

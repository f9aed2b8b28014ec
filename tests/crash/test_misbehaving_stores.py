"""Whatever a store does to any one call of a save: old or new commit, a typed error, and going on.

The store is slow, hangs, lets a put land long after it was given up for lost, cuts or damages what
it is given or asked for. Errors and crashes are in test_crash_points.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.crash.test_crash_points import CALLS, EXPECTED, WRITE_CALLS, struck
from tests.kit.crash_save import (
    OLD,
    OLDEST,
    POLICY,
    READ_BYTES_MAX,
    faults_found,
    faults_going_on,
    prepare,
    save,
)
from tests.kit.faulty_store import WRITES, Action, Fault, FaultyStore

from keepstep.ckpt.errors import CheckpointError, NotCommitted
from keepstep.ckpt.gc import collect
from keepstep.ckpt.keys import state_prefix
from keepstep.ckpt.log import Log
from keepstep.ckpt.verify import verify
from keepstep.storage.errors import (
    OutcomeUnknown,
    Permanent,
    StoreError,
    Throttled,
    Transient,
)
from keepstep.storage.memory import MemoryStore
from keepstep.storage.retry import REPEATABLE, RetryingStore, RetryPolicy
from keepstep.storage.store import Store

QUICK = RetryPolicy(deadline_s=120.0, pause_first_s=1e-4, pause_max_s=1e-3, throttled_first_s=1e-4)


def patient(store: Store) -> Store:
    """As `locate` opens stores of other machines."""
    return RetryingStore(store, QUICK, repeats_unknown=REPEATABLE)


def patient_save(store: Store, on_committed: Callable[[], None]) -> None:
    save(patient(store), on_committed)


@pytest.mark.parametrize("kind", [Transient, Throttled, OutcomeUnknown, Permanent])
def test_an_error_at_any_call_of_any_kind_old_or_new(kind: type[StoreError]) -> None:
    for at, call in enumerate(CALLS):
        inner = MemoryStore()
        acknowledged, error = struck(inner, Fault(Action.FAIL, at, error=kind), save)
        assert error is None or type(error) is kind, call
        assert faults_found(inner, acknowledged, EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


@pytest.mark.parametrize("kind", [Transient, Throttled])
@pytest.mark.parametrize("times", [1, 5])
def test_what_passes_is_not_noticed_behind_retries(kind: type[StoreError], times: int) -> None:
    for at, call in enumerate(CALLS):
        inner = MemoryStore()
        fault = Fault(Action.FAIL, at, times=times, error=kind)
        acknowledged, error = struck(inner, fault, patient_save)
        assert (acknowledged, error) == (True, None), call
        assert faults_found(inner, True, EXPECTED) == [], call


@pytest.mark.parametrize("action", [Action.LOSE_ANSWER, Action.LAND_LATE])
def test_a_lost_answer_is_not_noticed_behind_retries(action: Action) -> None:
    for at, call in enumerate(WRITE_CALLS):
        inner = MemoryStore()
        fault = Fault(action, at, operations=WRITES)
        acknowledged, error = struck(inner, fault, patient_save)
        assert (acknowledged, error) == (True, None), call
        assert faults_found(inner, True, EXPECTED) == [], call


def test_a_slow_call_changes_nothing() -> None:
    for at, call in enumerate(CALLS):
        inner = MemoryStore()
        acknowledged, error = struck(inner, Fault(Action.SLOW, at, seconds=0.002), save)
        assert (acknowledged, error) == (True, None), call
        assert faults_found(inner, True, EXPECTED) == [], call


@pytest.mark.parametrize("kind", [Transient, OutcomeUnknown])
def test_a_call_that_hangs_and_then_fails_leaves_old_or_new(kind: type[StoreError]) -> None:
    for at, call in enumerate(CALLS):
        inner = MemoryStore()
        prepare(inner)
        store = FaultyStore(inner, Fault(Action.HANG, at, error=kind))
        acknowledged: list[bool] = []
        errors: list[StoreError] = []

        def run(
            store: FaultyStore = store,
            acknowledged: list[bool] = acknowledged,
            errors: list[StoreError] = errors,
        ) -> None:
            try:
                save(store, lambda: acknowledged.append(True))
            except StoreError as caught:
                errors.append(caught)

        saving = threading.Thread(target=run)
        saving.start()
        try:
            assert store.wait_hung(60), call
            # Whoever reads meanwhile sees the old commit, or the new one if the hang is after it.
            assert faults_found(inner, False, EXPECTED) == [], call
        finally:
            store.release()
            saving.join(120)
        assert not saving.is_alive(), call
        assert all(type(error) is kind for error in errors), call
        assert faults_found(inner, bool(acknowledged), EXPECTED) == [], call
        assert faults_going_on(inner) == [], call


def test_a_put_that_lands_long_after_it_was_given_up_changes_nothing_newer() -> None:
    """S2: it lands when a later run has saved and collected, and nothing of theirs is another."""
    landed = 0
    for at, call in enumerate(WRITE_CALLS):
        inner = MemoryStore()
        prepare(inner)
        store = FaultyStore(inner, Fault(Action.LAND_LATE, at, operations=WRITES))
        acknowledged: list[bool] = []
        with suppress(OutcomeUnknown):
            save(store, lambda acknowledged=acknowledged: acknowledged.append(True))
        assert faults_found(inner, bool(acknowledged), EXPECTED) == [], call
        assert faults_going_on(inner) == [], call
        before = {info.key: inner.get(info.key, READ_BYTES_MAX) for info in inner.list("")}
        live = [committed.state for committed in Log(inner).read().live]
        store.land()
        after = {info.key: inner.get(info.key, READ_BYTES_MAX) for info in inner.list("")}
        landed += after != before
        assert {key: after.get(key) for key in before} == before, call
        assert [committed.state for committed in Log(inner).read().live] == live, call
        assert list(verify(inner, threads=1).findings) == [], call
        collect(Log(inner), POLICY)
        assert list(verify(inner, threads=1).unreferenced) == [], call
    assert landed > 0


@pytest.mark.parametrize("action", [Action.SHORT, Action.DAMAGE])
def test_whatever_a_read_gives_wrongly_the_store_stays_as_it_should_be(action: Action) -> None:
    reads = frozenset({"get", "get_range", "read_into"})
    count = sum(name in reads for name, _ in CALLS)
    noticed = 0
    for at in range(count):
        inner = MemoryStore()
        prepare(inner)
        acknowledged: list[bool] = []
        store = FaultyStore(inner, Fault(action, at, operations=reads))
        try:
            save(store, lambda acknowledged=acknowledged: acknowledged.append(True))
        except (CheckpointError, StoreError):
            noticed += 1
        assert faults_found(inner, bool(acknowledged), EXPECTED) == [], at
        assert faults_going_on(inner) == [], at
    assert noticed >= 4, "what gives bytes; the others ask for the end of the log"


@pytest.mark.parametrize("action", [Action.SHORT, Action.DAMAGE])
def test_what_a_put_stores_wrongly_is_found_and_the_older_state_is_whole(action: Action) -> None:
    puts = frozenset({"put"})
    keys = [key for name, key in CALLS if name == "put"]
    refusals: list[str] = []
    for at, key in enumerate(keys):
        inner = MemoryStore()
        prepare(inner)
        store = FaultyStore(inner, Fault(action, at, operations=puts))
        try:
            save(store)
        except NotCommitted as error:
            refusals.append(str(error))
        else:
            found = verify(inner, threads=1).findings
            assert {finding.file for finding in found} == {key}, found
        whole = [committed.state for committed in Log(inner).read().live]
        assert whole[-1] in (OLDEST, OLD)
        assert OLD in whole
        assert all(
            inner.get(name, READ_BYTES_MAX) == data
            for name, data in EXPECTED.items()
            if name.startswith(state_prefix(OLD))
        )
    # A commit looks at sizes; bytes are looked at by whoever reads them.
    assert len(refusals) == (2 if action is Action.SHORT else 0)
    assert all("bytes, rank" in refusal for refusal in refusals)

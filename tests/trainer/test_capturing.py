"""Capturing in step with the others: what is due, what is told, what the end waits for.

The keeper's part, the words of the seat, is played by hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from keepstep.ckpt.control import Entered
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.process import this_process
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.structure import merge_structures
from keepstep.ckpt.tiers import Due, TierPolicy, Tiers
from keepstep.trainer.capturing import Capturing, Lag
from keepstep.trainer.errors import NotSaved

ONE = Mesh((MeshAxis("dp_shard", 1),))
POLICY = Tiers(
    capture_every=1,
    peers=0,
    disk=TierPolicy(every_steps=4),
    store=TierPolicy(every_steps=8),
)


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    rendezvous = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("gloo", store=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Rank:
    """A rank that captures, and the words that its keeper writes."""

    def __init__(self, directory: Path, tiers: Tiers = POLICY, committed: int = -1) -> None:
        registry = Registry(ONE, 0)
        registry.add_tensor("model/w", torch.arange(64.0))
        self.snapshots = Snapshots(registry, merge_structures([registry.structure()]), "demo")
        self.pool = Pool.create(directory / "pool")
        slots = [self.pool.add_slot(self.snapshots.size_bytes) for _ in range(3)]
        self.seat = self.pool.seats[0]
        self.seat.take(0, this_process(), 1)
        entered = Entered(str(directory / "pool"), 0, tuple(slot.index for slot in slots))
        self.snapshots.open(entered, 1, 3)
        self.told: list[tuple[str, str]] = []
        self.capturing = Capturing(
            self.snapshots,
            tiers,
            generation=1,
            committed=committed,
            control=None,
            tell=self._tell,
            tell_first=self._tell,
            is_first=True,
        )

    def _tell(self, kind: str, reason: str, **details: object) -> None:
        self.told.append((kind, reason))

    def step(self, step: int) -> Lag:
        entries = self.capturing.entries(step)
        return self.capturing.capture(step, {name: value for name, (_, value) in entries.items()})

    def keep_up(self) -> None:
        """As a keeper that seals at once and drains nothing."""
        self.snapshots.wait()
        for slot in self.pool.slots:
            if slot.status == SlotStatus.CAPTURED:
                slot.sealed()
        self.seat.sealed = self.seat.acked = self.seat.captured

    def due_of(self, step: int) -> Due:
        (found,) = [
            slot.due
            for slot in self.pool.slots
            if slot.status >= SlotStatus.CAPTURED and slot.state.step == step
        ]
        return found

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def new(**settings: object) -> Rank:
        made.append(Rank(tmp_path, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for rank in made:
        rank.snapshots.close()
        rank.pool.close()


def test_every_step_is_captured_and_marked_for_the_tiers_that_are_due(
    make: Callable[..., Rank],
) -> None:
    rank = make()
    due = {}
    for step in range(1, 9):
        assert rank.step(step).captured
        rank.keep_up()
        due[step] = rank.due_of(step)
        rank.seat.drained = step
    assert {step: tiers for step, tiers in due.items() if tiers} == {
        4: Due.DISK,
        8: Due.DISK | Due.STORE,
    }
    assert [kind for kind in rank.kinds if kind != "capture_mode"] == []


def test_not_every_step_if_the_policy_says_so_but_what_is_due(make: Callable[..., Rank]) -> None:
    rank = make(tiers=msgspec.structs.replace(POLICY, capture_every=3))
    captured = []
    for step in range(1, 9):
        lag = rank.step(step)
        captured.append(lag.captured)
        assert lag.captured or lag.blocked_ms == 0.0
        rank.keep_up()
        rank.seat.drained = step
    assert [step for step, was in enumerate(captured, 1) if was] == [3, 4, 6, 8]


def test_what_is_due_by_the_clock_is_decided_by_rank_0_for_all(make: Callable[..., Rank]) -> None:
    rank = make(tiers=Tiers(store=TierPolicy(every_s=2.0)))
    assert rank.capturing.entries(1)["due"] == ("max", 0.0)
    time.sleep(2.0)
    assert rank.capturing.entries(1)["due"] == ("max", float(Due.STORE))
    rank.step(1)
    assert rank.capturing.entries(2)["due"] == ("max", 0.0)


def test_the_lag_is_since_the_state_that_is_durable(make: Callable[..., Rank]) -> None:
    rank = make(committed=40)
    assert rank.step(41).steps == 1
    time.sleep(0.1)
    for step in range(42, 48):
        rank.keep_up()
        rank.step(step)
    rank.keep_up()
    before_48_s = time.monotonic()
    rank.step(48)
    rank.keep_up()
    before = rank.step(49)
    assert before.steps == 9
    assert before.seconds > 0.1
    rank.keep_up()
    rank.seat.committed = 48
    after = rank.step(50)
    assert after.steps == 2
    assert after.seconds < time.monotonic() - before_48_s
    assert rank.capturing.committed == 48


def test_a_keeper_that_hangs_costs_captures_and_one_event(make: Callable[..., Rank]) -> None:
    rank = make()
    assert [rank.step(step).captured for step in (1, 2, 3)] == [True, False, False]
    assert rank.kinds == ["capture_skipped"]
    rank.keep_up()
    assert rank.step(4).captured
    kind, reason = rank.told[-1]
    assert (kind, "after 2 that were not" in reason) == ("capturing_again", True)
    assert [rank.step(step).captured for step in (5, 6)] == [True, False]
    rank.keep_up()
    assert rank.step(7).captured
    assert "after 1 that were not" in rank.told[-1][1]


def test_a_due_state_that_is_skipped_is_told_each_time(make: Callable[..., Rank]) -> None:
    rank = make()
    for step in range(1, 5):
        rank.step(step)
    assert rank.kinds == ["capture_skipped", "capture_skipped"]
    assert "step 4, which was due in disk, is not captured" in rank.told[-1][1]


def test_a_slow_tier_puts_the_next_due_state_off_and_that_is_told(
    make: Callable[..., Rank],
) -> None:
    rank = make()
    for step in range(1, 9):
        rank.step(step)
        rank.keep_up()
    (reason,) = [reason for kind, reason in rank.told if kind == "put_off"]
    assert reason.startswith("step 8 was due in disk and store, and a later one goes there")
    rank.seat.drained = 4
    rank.step(9)
    rank.keep_up()
    assert rank.due_of(9) == Due.DISK | Due.STORE


def test_the_end_waits_for_memory_for_the_tiers_and_for_the_commit(
    make: Callable[..., Rank],
) -> None:
    """The keeper is behind: it seals, drains and commits a moment after each was asked for."""
    rank = make()
    for step in range(1, 5):
        rank.step(step)
        rank.keep_up()
    did: list[str] = []

    def keeper() -> None:
        time.sleep(0.2)
        did.append("drained")
        rank.seat.drained = 4
        while rank.seat.captured != 5:
            time.sleep(0.01)
        rank.keep_up()
        time.sleep(0.2)
        did.append("committed")
        rank.seat.committed = 5

    thread = threading.Thread(target=keeper)
    thread.start()
    rank.capturing.save_last(5, patience_s=60)
    assert "waiting" not in rank.kinds  # it took a moment only
    assert did == ["drained", "committed"]
    thread.join()
    assert Due.STORE in rank.due_of(5)
    assert rank.capturing.committed == 5


def test_an_end_that_cannot_be_saved_says_so_after_its_patience(
    make: Callable[..., Rank],
) -> None:
    rank = make(committed=2)
    rank.seat.committed = 2
    rank.seat.failures = 3
    began_s = time.monotonic()
    with pytest.raises(NotSaved, match=r"stopped at step 3, .*3 failures .* commit is step 2"):
        rank.capturing.save_last(3, patience_s=0.3)
    assert 0.3 < time.monotonic() - began_s < 60


def test_an_end_that_takes_longer_than_a_moment_says_what_it_waits_for(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.trainer.capturing._TOLD_AFTER_S", 0.2)
    monkeypatch.setattr("keepstep.trainer.capturing._TOLD_EVERY_S", 0.4)
    rank = make()
    with pytest.raises(NotSaved):
        rank.capturing.save_last(1, patience_s=0.5, way_out="Ctrl-C again")
    told = [reason for kind, reason in rank.told if kind == "waiting"]
    assert told[0] == (
        "waiting for step 1 to be durable: not all of its images are in the store "
        "(at most 0 s without progress; Ctrl-C again: leave it in memory)"
    )
    assert len(told) == 1

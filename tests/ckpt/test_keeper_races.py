"""What happens to a keeper's memory when two things happen at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ckpt.test_keeper_memory import (
    ME,
    STRUCTURE,
    capture,
    enter,
    enter_of,
    open_memory,
    seal,
)
from tests.kit.keepers import header_of

from keepstep.ckpt.checksum import chunk_digests
from keepstep.ckpt.drain_jobs import Jobs
from keepstep.ckpt.entering import enter_rank
from keepstep.ckpt.host_answers import HostAnswers
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.sealer import Sealer, seal_slot
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due
from keepstep.storage.errors import Transient

WAIT_S = 20.0
FILL = 0x55
KEEPER = ME._replace(ticks=1)
"""Another process than the rank's, which is this one's."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[KeeperMemory]:
    made = open_memory(tmp_path)
    made.arrive(ME)
    yield made
    made.close()
    made.pool.close()


class SlowReporter:
    """The memory as a reporter, whose `drained` comes while a generation is begun."""

    def __init__(self, memory: KeeperMemory) -> None:
        self._memory = memory
        self.is_telling = threading.Event()
        self.is_beginning = threading.Event()

    def drained(self, rank: int, step: int) -> None:
        self.is_telling.set()
        self.is_beginning.wait(WAIT_S)
        self._memory.drained(rank, step)


def test_a_drain_that_ends_while_a_generation_begins_holds_up_neither(
    memory: KeeperMemory,
) -> None:
    slots = enter(memory, 0), enter(memory, 1)
    assert memory.tenure is not None
    seal(memory, capture(memory, slots[0][0], 0, 1))
    reporter = SlowReporter(memory)
    jobs = Jobs(reporter)  # type: ignore[arg-type]
    jobs.enter(memory.tenure)
    ticket = jobs.add(memory.shelf.all()[0], Due.STORE)
    assert ticket is not None

    def begin(tenure: Tenure) -> None:
        reporter.is_beginning.set()
        jobs.enter(tenure)

    work: list[Callable[[], object]] = [
        lambda: jobs.release(ticket),
        lambda: enter_rank(memory, enter_of(0, 2), ME, begin),
    ]
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    threads[0].start()
    assert reporter.is_telling.wait(WAIT_S)
    threads[1].start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [thread.is_alive() for thread in threads] == [False, False]
    assert memory.seat(0) is not None


def give_away(memory: KeeperMemory, slot: Slot) -> None:
    """A newer generation begins, whose rank writes into the slot."""
    memory.me = KEEPER
    memory.give_promise(2, 2, "x")
    for rank in (0, 1):
        memory.leave(rank, ME, is_finished=False)
    memory.arrive(ME)
    assert slot.index in (*enter(memory, 0, 2), *enter(memory, 1, 2))
    slot.claim(ME, 0, State(2, 1), Due.NOWHERE)
    slot.image[:] = bytes([FILL]) * slot.capacity_bytes


def test_a_slot_that_is_given_away_while_it_is_sealed_is_not_written(
    memory: KeeperMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = enter(memory, 0), enter(memory, 1)
    slot = capture(memory, slots[0][0], 0, 1)

    def slowly(data: memoryview) -> list[str]:
        found = chunk_digests(data)
        give_away(memory, slot)
        return found

    monkeypatch.setattr("keepstep.ckpt.sealer.chunk_digests", slowly)
    assert seal_slot(memory, slot, slot.read().turn) is None
    assert slot.status is SlotStatus.FILLING
    assert bytes(slot.image) == bytes([FILL]) * slot.capacity_bytes


def test_a_slot_that_is_given_away_while_its_image_is_refused_is_not_freed(
    tmp_path: Path,
) -> None:
    memory = open_memory(tmp_path)
    memory.arrive(ME)
    slots = enter(memory, 0), enter(memory, 1)
    slot = memory.pool.slots[slots[0][0]]
    slot.claim(ME, 0, State(1, 1), Due.NOWHERE)
    slot.captured(b"no JSON", header_of(STRUCTURE, 0).size_bytes)

    def tell(kind: str, reason: str, **details: object) -> None:
        if kind == "capture_refused":
            memory.tell = lambda *words, **details: None
            give_away(memory, slot)

    memory.tell = tell
    seal_slot(memory, slot, slot.read().turn)
    assert slot.status is SlotStatus.FILLING
    memory.close()
    memory.pool.close()


def test_a_peers_image_whose_keeper_died_before_it_was_sealed_gives_its_slot_back(
    tmp_path: Path,
) -> None:
    memory = open_memory(tmp_path)
    memory.arrive(ME)
    enter(memory, 0)
    slot = memory.pool.add_slot(header_of(STRUCTURE, 1).size_bytes)
    dead = ME._replace(ticks=1)
    slot.claim(dead, 1, State(1, 1), Due.NOWHERE, is_own=False)
    slot.captured(b"{}", header_of(STRUCTURE, 1).size_bytes)
    memory.close()
    memory.pool.close()
    successor = open_memory(tmp_path)
    successor.bury()
    assert successor.pool.slots[slot.index].status is SlotStatus.FREE
    successor.close()
    successor.pool.close()


def join_looks() -> None:
    for thread in threading.enumerate():
        if thread.name == "keepstep-disk-look":
            thread.join(WAIT_S)


def test_a_disk_that_hangs_holds_up_no_inventory(tmp_path: Path) -> None:
    told: list[str] = []
    memory = open_memory(tmp_path, patience_s=0.1)
    memory.tell = lambda kind, reason, **details: told.append(f"{kind}: {reason}")
    never = threading.Event()

    def hang() -> object:
        never.wait(WAIT_S)
        raise Transient("the test is over")

    sealing = Sealer(memory, lambda shelved: None)
    answers = HostAnswers(memory, sealing, hang, lambda generation: None, dict)  # type: ignore[arg-type]
    found: list[object] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(answers.inventory()), daemon=True)
        thread.start()
        thread.join(WAIT_S / 4)
    assert len(found) == 2
    assert any("does not answer" in each for each in told)
    assert sum(each.name == "keepstep-disk-look" for each in threading.enumerate()) <= 1
    never.set()
    join_looks()
    memory.close()
    memory.pool.close()

"""A keeper's memory without its process: what is too late, too early, or somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.kit.keepers import HOST, JOB, data_of, header_of, make_structure

from keepstep.ckpt.control import Enter
from keepstep.ckpt.entering import enter_rank
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.hostdir import HostDir, make_host_dir
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import NoRoom, Refusal, Stale
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keeper_record import read_record
from keepstep.ckpt.manifest import ImageRecord, State
from keepstep.ckpt.peer_memory import PeerMemory
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.process import this_process
from keepstep.ckpt.sealer import seal_slot
from keepstep.ckpt.shelf import Shelf
from keepstep.ckpt.structures import Structures
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due, Tiers

STRUCTURE = make_structure(2, 1 << 16)
ME = this_process()


class Book:
    """Remembers events."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def tell(self, kind: str, reason: str, **details: object) -> None:
        self.kinds.append(kind)


def open_memory(directory: Path, book: Book | None = None, **changes: object) -> KeeperMemory:
    config = KeeperConfig(
        job=JOB, host=HOST, store_url="", shm_dir=str(directory / "shm"), tiers=Tiers(peers=0)
    )
    config = msgspec.structs.replace(config, **changes)
    place: HostDir = make_host_dir(Path(config.shm_dir), JOB, HOST)
    pool = Pool.open(place.pool) if place.pool.exists() else Pool.create(place.pool)
    memory = KeeperMemory(
        config,
        place,
        pool,
        Shelf(),
        Structures(place, JOB),
        read_record(place.keeper_json),
        (book or Book()).tell,
    )
    memory.is_adopted.set()
    return memory


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[KeeperMemory]:
    made = open_memory(tmp_path)
    made.arrive(ME)
    yield made
    made.close()
    made.pool.close()


def enter_of(rank: int, generation: int = 1) -> Enter:
    header = header_of(STRUCTURE, rank)
    return Enter(
        generation=generation,
        term=generation,
        rank=rank,
        ranks=(0, 1),
        hosts=(0, 0),
        addresses=(HostAddress(HOST, "", ""),),
        committer=0,
        base=None,
        structure=STRUCTURE,
        header=header.encoded,
        image_bytes_max=header.size_bytes,
    )


def enter(memory: KeeperMemory, rank: int, generation: int = 1) -> tuple[int, ...]:
    begun: list[Tenure] = []
    return enter_rank(memory, enter_of(rank, generation), ME, begun.append).slots


def capture(memory: KeeperMemory, index: int, rank: int, step: int, generation: int = 1) -> Slot:
    slot = memory.pool.slots[index]
    header = header_of(STRUCTURE, rank)
    state = State(generation, step)
    slot.claim(ME, rank, state, Due.NOWHERE)
    begin, end = header.header_bytes, header.size_bytes
    slot.image[begin:end] = data_of(state, rank, end - begin)
    slot.captured(b"{}", end)
    return slot


def test_an_image_that_is_sealed_too_late_for_a_promise_is_not_sealed(
    memory: KeeperMemory,
) -> None:
    slots = enter(memory, 0)
    slot = capture(memory, slots[0], 0, 1)
    (row,) = memory.look()
    memory.give_promise(2, 2, "x")
    assert seal_slot(memory, slot, slot.read().turn) is None
    assert row.index == slot.index
    assert slot.status is SlotStatus.CAPTURED
    assert memory.shelf.all() == ()


def test_what_is_captured_is_found_by_rank_and_step(memory: KeeperMemory) -> None:
    first, second = enter(memory, 0), enter(memory, 1)
    capture(memory, first[1], 0, 2)
    capture(memory, second[0], 1, 1)
    capture(memory, first[0], 0, 1)
    found = [(row.state.step, row.rank) for row in memory.look()]
    assert found == [(1, 0), (1, 1), (2, 0)]


def seal(memory: KeeperMemory, slot: Slot) -> None:
    assert seal_slot(memory, slot, slot.read().turn) is not None


def test_reports_go_to_the_ranks_seat_and_never_back(memory: KeeperMemory) -> None:
    slots = enter(memory, 0)
    for step in (1, 2):
        seal(memory, capture(memory, slots[step], 0, step))
    seat = memory.seat(0)
    assert seat is not None
    memory.acked(0, 9)
    assert seat.acked == 2  # nobody has what is not sealed
    memory.acked(0, 1)
    memory.drained(0, 2)
    memory.drained(0, 1)
    memory.committed(State(1, 2))
    memory.committed(State(1, 1))
    memory.committed(State(0, 7))
    memory.acked(1, 2)  # has not entered
    assert (seat.acked, seat.drained, seat.committed) == (2, 2, 2)


def test_reports_of_a_superseded_generation_change_nothing(memory: KeeperMemory) -> None:
    slots = enter(memory, 0)
    seal(memory, capture(memory, slots[0], 0, 1))
    memory.give_promise(2, 2, "x")
    memory.acked(0, 1)
    memory.drained(0, 1)
    seat = memory.seat(0)
    assert seat is not None
    assert (seat.acked, seat.drained) == (-1, -1)


def test_a_rank_that_leaves_takes_nothing_from_another_of_its_process(
    memory: KeeperMemory,
) -> None:
    slots = enter(memory, 0), enter(memory, 1)
    memory.leave(0, ME, is_finished=False)
    owners = [memory.pool.slots[index].owner for index in slots[0]]
    assert owners == [None] * 3
    assert all(memory.pool.slots[index].owner for index in slots[1])
    assert memory.seat(0) is None
    assert memory.seat(1) is not None
    assert len(memory.pidfds) == 1


def test_an_image_leaves_the_shelf_when_its_rank_writes_anew(memory: KeeperMemory) -> None:
    slots = enter(memory, 0)
    slot = capture(memory, slots[0], 0, 1)
    seal(memory, slot)
    with memory.shelf.hold(memory.shelf.all()[0]) as is_there:
        assert is_there
        slot.claim(ME, 0, State(1, 2), Due.NOWHERE)
        memory.look()
        assert memory.shelf.all() == ()
    assert memory.shelf.held() == frozenset()


def test_once_it_ends_nobody_arrives(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, patience_s=0.0)
    memory.arrive(ME)
    assert memory.why_end() == ""
    enter(memory, 0)
    enter(memory, 1)
    memory.leave(0, ME, is_finished=True)
    assert memory.why_end() == ""
    memory.leave(1, ME, is_finished=True)
    assert memory.why_end() == "all ranks of this host have finished"
    with pytest.raises(Refusal, match="is ending"):
        memory.arrive(ME)
    memory.close()
    memory.pool.close()


def test_a_successor_knows_the_tenure(memory: KeeperMemory, tmp_path: Path) -> None:
    enter(memory, 0)
    other = open_memory(tmp_path)
    assert other.tenure == memory.tenure
    assert not other.is_complete
    enter(memory, 1)
    third = open_memory(tmp_path)
    assert third.is_complete
    for each in (other, third):
        each.close()
        each.pool.close()


def test_a_structure_file_that_was_changed_is_refused(memory: KeeperMemory) -> None:
    enter(memory, 0)
    path = memory.place.structure(STRUCTURE.digest)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F16"', 1))
    with pytest.raises(FormatError, match="plan_digest"):
        Structures(memory.place, JOB).find(STRUCTURE.digest)


def test_a_peers_image_is_refused_before_the_ranks_here_have_entered(
    memory: KeeperMemory,
) -> None:
    peers = PeerMemory(memory)
    with pytest.raises(NoRoom, match="not ready for generation 1"):
        peers.take(1, 1, State(1, 1), 5, 1000, -1)
    memory.give_promise(3, 3, "x")
    with pytest.raises(Stale):
        peers.take(2, 3, State(2, 1), 5, 1000, -1)


def test_a_peers_image_that_comes_too_late_for_a_promise_is_dropped(
    memory: KeeperMemory,
) -> None:
    enter(memory, 0)
    enter(memory, 1)
    memory.pool.add_slot(header_of(STRUCTURE, 1).size_bytes)
    peers = PeerMemory(memory)
    header = header_of(STRUCTURE, 1)
    slot = peers.take(1, 1, State(1, 1), 1, header.size_bytes, -1)
    assert slot.status is SlotStatus.FILLING
    memory.give_promise(2, 2, "x")
    record = ImageRecord(1, header.size_bytes, header.header_bytes, "0" * 32)
    with pytest.raises(Stale):
        peers.keep(slot, header.at(State(1, 1)), record, b"{}", STRUCTURE)
    assert slot.read().status is SlotStatus.FREE
    peers.drop(slot)
    assert memory.shelf.all() == ()

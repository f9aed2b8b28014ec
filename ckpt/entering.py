"""A rank enters a generation: its seat, its slots, and memory for the images of peers. Blocking."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.ckpt.control import Enter, Entered
from keepstep.ckpt.keeper_core import (
    check_enter,
    check_fence,
    choose_own,
    peer_slots_missing,
    surplus_rows,
)
from keepstep.ckpt.keeper_errors import Refusal, SlotsTaken
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.manifest import State
from keepstep.ckpt.peers import choose
from keepstep.ckpt.pool_errors import PoolTooLarge
from keepstep.ckpt.pool_table import Owner, Seat, SlotStatus, Writer
from keepstep.ckpt.structures import Structures, check_sound
from keepstep.ckpt.tenure import Tenure

SLOTS_MIN = 2
"""Images of a rank without which nothing can be captured."""


def enter_rank(
    memory: KeeperMemory, enter: Enter, writer: Writer, on_tenure: Callable[[Tenure], None]
) -> Entered:
    """Let a rank in; the same again for one that asks again, or goes on with another structure.

    The first of a generation makes the tenure, which is persisted before anybody gets a slot, and
    told to `on_tenure`; the last one has memory for peers' images made, and what is left over
    given back.

    Raises:
        Stale: a newer generation or term was promised.
        Refusal, FormatError: what it says contradicts itself, or the ranks before it.
        SlotsTaken: an older process lives, and there is no memory beside it.
        PoolTooLarge: memory does not suffice for two images of each rank.
    """
    check_sound(enter.structure, memory.config.job, f"the structure of rank {enter.rank}")
    memory.structures.header(enter.structure, enter.rank)  # takes its time, so before the lock
    memory.bury()
    who = f"rank {enter.rank} (pid {writer.pid})"
    with memory.entering:
        tenure = _joined(memory, enter, writer, who)
        if tenure is not None:
            # Not under the memory's lock: services report to it under locks of their own.
            on_tenure(tenure)
        with memory.lock:
            check_fence(memory.promise, enter.generation, enter.term, who)
            seat = _seat(memory, enter, writer)
            slots = _slots(memory, enter, writer) if enter.header else ()
            if not memory.is_complete and _all_are_in(memory, enter):
                provide_for_peers(memory)
                memory.complete()
            return Entered(pool=str(memory.place.pool), seat=seat.index, slots=slots)


def _joined(memory: KeeperMemory, enter: Enter, writer: Writer, who: str) -> Tenure | None:
    """The tenure that begins with this rank; None if it joins the present one."""
    with memory.lock:
        check_fence(memory.promise, enter.generation, enter.term, who)
        sitting = memory.seat(enter.rank)
        has_entered = sitting is not None and sitting.writer == writer
        is_first = check_enter(memory.tenure, enter, memory.config.host, has_entered=has_entered)
        _check_header(memory.structures, memory.config.job, enter)
        if not is_first:
            return None
        tenure = _tenure(memory, enter)
        memory.begin(tenure)
        return tenure


def senders(tenure: Tenure) -> tuple[int, ...]:
    """The remote ranks whose images this host is to hold."""
    chosen = choose(tenure.addresses, tenure.tiers.peers)
    mine = [index for index, each in enumerate(tenure.addresses) if each.host == tenure.host]
    return tuple(rank for rank, index in enumerate(tenure.hosts) if set(mine) & set(chosen[index]))


def provide_for_peers(memory: KeeperMemory) -> None:
    """Make slots for peers' images, give back what is left over. Raises PoolTooLarge."""
    tenure = memory.tenure
    if tenure is None:
        return
    sizes = [memory.structures.header(tenure.structure, rank) for rank in senders(tenure)]
    sizes_bytes = [header.size_bytes for header in sizes if header.data_bytes]
    ranks, size_bytes = len(sizes_bytes), max(sizes_bytes, default=0)
    with memory.lock:
        pinned, living = memory.pinned(), memory.living
        place = (pinned, living, tenure.generation, ranks, size_bytes)
        for index in surplus_rows(memory.rows(), *place, memory.config.slots):
            memory.free(memory.pool.slots[index])
            memory.pool.remove_slot(index)
        for count in range(memory.config.slots, SLOTS_MIN - 1, -1):
            missing = peer_slots_missing(memory.rows(), *place, count)
            try:
                for _ in range(missing):
                    memory.pool.add_slot(size_bytes, "the image of a rank of another host")
            except PoolTooLarge as error:
                if count == SLOTS_MIN:
                    raise
                memory.tell("memory_short", f"{count - 1} images of each peer's rank: {error}")
            else:
                return


def _all_are_in(memory: KeeperMemory, enter: Enter) -> bool:
    return all(memory.seat(rank) is not None for rank in enter.ranks)


def _tenure(memory: KeeperMemory, enter: Enter) -> Tenure:
    return Tenure(
        job=memory.config.job,
        host=memory.config.host,
        generation=enter.generation,
        term=enter.term,
        ranks=enter.ranks,
        hosts=enter.hosts,
        addresses=enter.addresses,
        committer=enter.committer,
        base=enter.base,
        structure=enter.structure,
        tiers=memory.config.tiers,
    )


def _check_header(structures: Structures, job: str, enter: Enter) -> None:
    """Raise Refusal unless the rank's header is what the structure says it must be."""
    planned = structures.header(enter.structure, enter.rank)
    if not planned.data_bytes:
        if enter.header:
            raise Refusal(f"rank {enter.rank} owns nothing by the structure, but has a header")
        return
    if planned.size_bytes > enter.image_bytes_max:
        raise Refusal(
            f"rank {enter.rank}: its image has {planned.size_bytes} bytes by the structure, but it "
            f"asks for slots of {enter.image_bytes_max}"
        )
    likely = (planned.at(State(generation, 0)).encoded for generation in (0, enter.generation))
    if enter.header not in likely:
        raise Refusal(
            f"rank {enter.rank}: its header of {len(enter.header)} bytes is not the one of "
            f"{planned.header_bytes} bytes that follows from structure {enter.structure.digest} "
            f"of job {job!r}; rank and keeper must run the same version"
        )


def _seat(memory: KeeperMemory, enter: Enter, writer: Writer) -> Seat:
    """The rank's seat, taken: the same one if it asks again. Raises SlotsTaken."""
    sitting = memory.seat(enter.rank)
    if sitting is not None:
        if sitting.writer == writer:
            return sitting
        if sitting.writer in memory.living:
            raise SlotsTaken(
                f"rank {enter.rank} of generation {enter.generation} is pid {sitting.writer.pid} "
                f"already; end it first, or begin a new generation",
                pid=sitting.writer.pid,
            )
        sitting.leave()
    for seat in memory.pool.seats:
        if seat.is_taken and seat.writer == writer and seat.generation < enter.generation:
            memory.dismiss(seat)
    free = [seat for seat in memory.pool.seats if not seat.is_taken]
    if not free:
        raise Refusal(f"all {len(memory.pool.seats)} seats of this host are taken")
    free[0].take(enter.rank, writer, enter.generation)
    return free[0]


def _slots(memory: KeeperMemory, enter: Enter, writer: Writer) -> tuple[int, ...]:
    """The rank's slots, assigned to it, first the one to begin with."""
    owner = Owner(writer, enter.rank)
    owned = []
    for slot in memory.pool.slots:
        if slot.owner == owner and slot.capacity_bytes >= enter.image_bytes_max:
            owned.append(slot.index)
        elif slot.owner == owner:
            slot.unassign()
    pinned = memory.pinned()
    choice = choose_own(
        memory.rows(),
        pinned,
        memory.living,
        enter.generation,
        enter.rank,
        enter.image_bytes_max,
        max(0, memory.config.slots - len(owned)),
    )
    made = _make(memory, enter, choice.missing, SLOTS_MIN - len(owned) - len(choice.slots))
    held = memory.shelf.held()
    for index in (*choice.slots, *made):
        slot = memory.pool.slots[index]
        is_sealed = slot.status is SlotStatus.SEALED
        if is_sealed and slot.state not in pinned and index not in held:
            memory.free(slot)
        slot.assign(writer, enter.rank)
    given = sorted((*owned, *choice.slots, *made)[: memory.config.slots])
    slots = memory.pool.slots
    given.sort(
        key=lambda index: (
            slots[index].status is SlotStatus.SEALED
            and (slots[index].state in pinned or index in held)
        )
    )
    return tuple(given)


def _make(memory: KeeperMemory, enter: Enter, missing: int, needed: int) -> list[int]:
    """Make `missing` slots, or `needed` at least. Raises PoolTooLarge, or SlotsTaken."""
    made: list[int] = []
    is_lean = False
    while len(made) < missing:
        try:
            slot = memory.pool.add_slot(enter.image_bytes_max, f"the image of rank {enter.rank}")
        except PoolTooLarge as error:
            if not is_lean:
                is_lean = True
                _give_back_all(memory, enter.generation, made)
                continue
            if len(made) >= needed:
                memory.tell("memory_short", f"rank {enter.rank} has a slot less: {error}")
                break
            for index in made:
                memory.pool.remove_slot(index)
            raise _in_the_way(memory, enter, error) from error
        made.append(slot.index)
    return made


def _give_back_all(memory: KeeperMemory, generation: int, made: list[int]) -> None:
    """Give back all slots of older layouts that nobody needs."""
    rows = [row for row in memory.rows() if row.index not in made]
    for index in surplus_rows(rows, memory.pinned(), memory.living, generation, 0, 0, 0):
        memory.free(memory.pool.slots[index])
        memory.pool.remove_slot(index)


def _in_the_way(memory: KeeperMemory, enter: Enter, error: PoolTooLarge) -> Exception:
    """SlotsTaken, if a living process of an older generation has memory here; else `error`."""
    for seat in memory.pool.seats:
        if seat.is_taken and seat.generation < enter.generation and seat.writer in memory.living:
            return SlotsTaken(
                f"{error}; and rank {seat.rank} of generation {seat.generation} (pid "
                f"{seat.writer.pid}) still lives and owns memory: end it",
                pid=seat.writer.pid,
            )
    return error

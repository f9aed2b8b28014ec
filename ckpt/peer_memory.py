"""Memory for images that other hosts' keepers send. See `service.PeerSlots` for each method."""

from __future__ import annotations

from keepstep.ckpt.adopt import decode_values
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.keeper_core import check_fence, choose_peer
from keepstep.ckpt.keeper_errors import NoRoom, Stale
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.manifest import ImageRecord, State
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Due


class PeerMemory:
    """A `PeerSlots`: thin, over the keeper's memory. Thread-safe."""

    def __init__(self, memory: KeeperMemory) -> None:
        self._memory = memory
        self._taken: dict[int, tuple[int, int]] = {}
        """By slot: generation and term of the sender."""

    def structure(self, digest: str) -> Structure | None:
        return self._memory.structures.find(digest)

    def keep_structure(self, structure: Structure) -> None:
        self._memory.structures.keep(structure)

    def take(
        self,
        generation: int,
        term: int,
        state: State,
        rank: int,
        size_bytes: int,
        agreed_acked: int,
    ) -> Slot:
        memory = self._memory
        who = f"the keeper of rank {rank}"
        with memory.lock:
            check_fence(memory.promise, generation, term, who)
            tenure = memory.tenure
            is_ready = memory.is_adopted.is_set() and memory.is_complete
            if tenure is None or not is_ready or generation != tenure.generation:
                raise NoRoom(
                    f"no slot for the image of rank {rank} in {state_words(state)}: host "
                    f"{memory.config.host} is not ready for generation {generation} yet"
                )
            if state.generation != generation:
                raise Stale(
                    f"{who} sends {state_words(state)} under generation {generation}",
                    generation=memory.promise.generation,
                    term=memory.promise.term,
                )
            if agreed_acked >= 0 and not memory.is_settled:
                memory.settle()
            slot = memory.pool.slots[
                choose_peer(
                    memory.rows(),
                    memory.pinned(),
                    memory.living,
                    state,
                    rank,
                    size_bytes,
                    agreed_acked,
                    memory.config.slots,
                )
            ]
            memory.free(slot)
            slot.claim(memory.me, rank, state, Due.NOWHERE, is_own=False)
            self._taken[slot.index] = (generation, term)
            return slot

    def keep(
        self,
        slot: Slot,
        header: ImageHeader,
        record: ImageRecord,
        values: bytes,
        structure: Structure,
    ) -> Shelved:
        memory = self._memory
        with memory.lock:
            try:
                check_fence(memory.promise, *self._taken[slot.index], f"the image of {record.rank}")
                shelved = Shelved(
                    state=header.state,
                    rank=record.rank,
                    is_own=False,
                    header=header,
                    record=record,
                    due=Due.NOWHERE,
                    slot=slot.index,
                    view=slot.image[: record.size_bytes],
                    values=decode_values(values, image_key(header.state, record.rank)),
                    structure=structure,
                )
                slot.captured(values, record.size_bytes)
            except CheckpointError:
                self.drop(slot)
                raise
            del self._taken[slot.index]
            memory.shelve(shelved, slot.read().turn, is_new=True)
            return shelved

    def drop(self, slot: Slot) -> None:
        memory = self._memory
        with memory.lock:
            taken = self._taken.pop(slot.index, None)
            if taken is not None and slot.status is SlotStatus.FILLING:
                slot.free()

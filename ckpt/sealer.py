"""Sealing: checksums of what a rank captured, written into its header; one thread for a host.

The same thread verifies what an earlier keeper had sealed, before anything else is done.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from keepstep.ckpt.adopt import adopt, decode_values
from keepstep.ckpt.checksum import chunk_digests
from keepstep.ckpt.errors import CheckpointError, FormatError
from keepstep.ckpt.image import image_record, seal
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.pool_table import SlotFacts, SlotStatus
from keepstep.ckpt.shelf import Shelved

NICE = 5
"""Below the ranks, which share the cores."""


class Sealer:
    """Seals what `KeeperMemory.look` finds, in order."""

    def __init__(self, memory: KeeperMemory, on_sealed: Callable[[Shelved], None]) -> None:
        """`on_sealed` is called, in the sealer's thread, with each own image that was sealed."""
        self._memory = memory
        self._on_sealed = on_sealed
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, int]] = deque()
        self._is_busy = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="keepstep-sealer", daemon=True)

    def start(self) -> None:
        """Start the thread: it adopts what is there, then seals what `submit` names."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread is there; without it the keeper is of no use."""
        return self._thread.is_alive()

    def submit_captured(self) -> None:
        """Look at the table, and take on what is to be sealed and is not in the queue yet."""
        if not self._memory.is_adopted.is_set():
            return
        found = [(row.index, row.turn) for row in self._memory.look()]
        with self._changed:
            for entry in found:
                if entry not in self._queue:
                    self._queue.append(entry)
            if found:
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Until everything that was submitted is sealed; False if it took longer. Blocking."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queue and not self._is_busy, timeout=timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Seal what was submitted, then end the thread; False if it took longer. Blocking."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for shelved in adopt(self._memory):
            self._on_sealed(shelved)
        self._memory.is_adopted.set()
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                index, turn = self._queue.popleft()
                self._is_busy = True
            sealed = seal_slot(self._memory, self._memory.pool.slots[index], turn)
            if sealed is not None:
                self._on_sealed(sealed)


def seal_slot(memory: KeeperMemory, slot: Slot, turn: int) -> Shelved | None:
    """Seal the image in a CAPTURED slot. What cannot be one is told, and the slot freed.

    None also if the slot has changed since it had `turn`, or a newer generation was promised.
    """
    facts = slot.read()
    if facts.status is not SlotStatus.CAPTURED or facts.turn != turn:
        return None
    try:
        shelved = _sealed(memory, slot, facts)
    except (CheckpointError, ValueError) as error:
        memory.tell(
            "capture_refused",
            f"what rank {facts.rank} captured cannot be sealed: {error}",
            rank=facts.rank,
            generation=facts.state.generation,
            step=facts.state.step,
        )
        memory.refuse(slot, facts)
        return None
    return shelved if memory.shelve(shelved, facts.turn, is_new=True) else None


def _sealed(memory: KeeperMemory, slot: Slot, facts: SlotFacts) -> Shelved:
    file = image_key(facts.state, facts.rank)
    tenure = memory.tenure
    if tenure is None or facts.state.generation != tenure.generation:
        entered = "none" if tenure is None else f"{tenure.generation}"
        found = f"{facts.state.generation}"
        raise FormatError(file, "generation", f"{entered}, that ranks entered", found)
    if facts.rank not in tenure.ranks:
        raise FormatError(file, "rank", f"one of {tenure.ranks}", f"{facts.rank}")
    header = memory.structures.header(tenure.structure, facts.rank).at(facts.state)
    if facts.size_bytes != header.size_bytes:
        expected = f"{header.size_bytes} bytes, by the structure"
        raise FormatError(file, "size", expected, f"{facts.size_bytes}")
    values = decode_values(slot.values, file)
    view = slot.image[: facts.size_bytes]
    digests = chunk_digests(view[header.header_bytes :])
    encoded = seal(header, digests)
    return Shelved(
        state=facts.state,
        rank=facts.rank,
        is_own=True,
        header=replace(header, digests=tuple(digests), encoded=encoded),
        record=image_record(header, encoded),
        due=facts.due,
        slot=slot.index,
        view=view,
        values=values,
        structure=tenure.structure,
    )

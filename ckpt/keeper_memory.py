"""A keeper's memory: its pool, and who may do what in it. Thread-safe; the rules are the core's.

One lock covers the promise, the tenure and every change of a slot's status by the keeper. It is
held while memory for a rank that enters is made and touched, but never over a store, a disk or a
peer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_core import (
    Promise,
    Row,
    check_fence,
    pinned_states,
    promised,
    rows_to_free,
    rows_to_seal,
    void_rows,
    why_end,
)
from keepstep.ckpt.keeper_errors import Refusal
from keepstep.ckpt.keeper_record import KeeperRecord, load_tenure, save_tenure
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pidfd import has_exited, watch_process
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_errors import PoolDamaged
from keepstep.ckpt.pool_table import Owner, Seat, SlotFacts, SlotStatus, Writer
from keepstep.ckpt.process import this_process
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.structures import Structures
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due

FIRST_S = 60.0
"""Besides its patience, so long does a keeper wait for the first rank to come."""

Tell = Callable[..., None]
"""`tell(kind, reason, **details)`: makes an event."""


class KeeperMemory:
    """The pool of one host, with the promise that the keeper gave and the tenure it serves.

    Attributes:
        lock: of all below; may be taken twice.
        entering: held by a rank that enters, before `lock`: one at a time, and none gets slots
            before the services know of its tenure.
        promise: below which everything is refused.
        tenure: what ranks entered last; None before.
        is_complete: all ranks of the tenure have entered, and there is memory for peers' images.
        is_settled: all ranks of the tenure have a state of it, sealed and acknowledged.
        is_adopted: set when the images of an earlier keeper have been verified. Before that
            nothing is given out.
        address: of the data plane; "" for none.
    """

    def __init__(
        self,
        config: KeeperConfig,
        place: HostDir,
        pool: Pool,
        shelf: Shelf,
        structures: Structures,
        record: KeeperRecord,
        tell: Tell,
    ) -> None:
        """Take up what an earlier keeper left (`record`). Nothing is verified yet: see `adopt`."""
        self.config = config
        self.place = place
        self.pool = pool
        self.shelf = shelf
        self.structures = structures
        self.tell = tell
        self.me = this_process()
        self.lock = threading.RLock()
        self.entering = threading.Lock()
        self.address = ""
        self.promise = Promise(record.generation, record.term)
        self.tenure: Tenure | None = None
        self.is_complete = False
        self.is_settled = False
        self.is_adopted = threading.Event()
        self._is_ending = False
        self._pidfds: dict[Writer, int] = {}
        self._finished: dict[int, set[int]] = {}
        self._alone_since_s = time.monotonic()
        self._patience_s = config.patience_s + FIRST_S
        self._has_come = False
        self._take_up_tenure(record)
        pool.header.raise_fence(record.generation)
        for writer in self._writers():
            self.arrive(writer)

    # Who is there

    @property
    def living(self) -> set[Writer]:
        """The processes that keep what they own: ranks, and this keeper."""
        return {self.me, *self._pidfds}

    @property
    def pidfds(self) -> tuple[int, ...]:
        """To wait for: readable when a rank's process has exited. Then call `bury`."""
        with self.lock:
            return tuple(self._pidfds.values())

    def arrive(self, writer: Writer) -> bool:
        """A rank's process is here. False if it is gone already. Raises Refusal at the end."""
        with self.lock:
            if self._is_ending:
                raise Refusal(
                    f"the keeper of host {self.config.host} is ending, since no rank was there; "
                    f"start another"
                )
            if writer in self._pidfds:
                return True
            pidfd = watch_process(writer)
            if pidfd is None:
                return False
            self._pidfds[writer] = pidfd
            self._patience_s = self.config.patience_s
            self._has_come = True
            return True

    def bury(self) -> None:
        """Take back what processes owned that have exited, and the images they did not finish."""
        with self.lock:
            for writer in [one for one, pidfd in self._pidfds.items() if has_exited(pidfd)]:
                self._go(writer)
            self._take_back()

    def leave(self, rank: int, writer: Writer, *, is_finished: bool) -> None:
        """A rank goes by itself: its slots are no more its own."""
        with self.lock:
            if is_finished and self.tenure is not None and rank in self.tenure.ranks:
                self._finished.setdefault(self.tenure.generation, set()).add(rank)
            seats = [seat for seat in self.pool.seats if seat.is_taken and seat.writer == writer]
            others = [seat for seat in seats if seat.rank != rank]
            for seat in seats:
                if seat not in others:
                    self.dismiss(seat)
            if writer in self._pidfds and not others:
                self._go(writer)
            self._take_back()

    def dismiss(self, seat: Seat) -> None:
        """Nobody sits there any more, and what was assigned to who did is nobody's."""
        with self.lock:
            owner = Owner(seat.writer, seat.rank)
            for slot in self.pool.slots:
                if slot.owner == owner:
                    slot.unassign()
            seat.leave()

    def why_end(self) -> str:
        """Why this keeper and its memory are needed no more; "" if they are.

        Once there is a reason, no rank arrives any more.
        """
        with self.lock:
            if self._pidfds:
                self._alone_since_s = time.monotonic()
            ranks = () if self.tenure is None else self.tenure.ranks
            generation = 0 if self.tenure is None else self.tenure.generation
            reason = why_end(
                len(self._pidfds),
                ranks,
                self._finished.get(generation, set()),
                time.monotonic() - self._alone_since_s,
                self._patience_s,
                is_empty=self._has_come and not self._has_images(),
            )
            self._is_ending = bool(reason)
            return reason

    def _has_images(self) -> bool:
        """Whether any slot holds an image, or is about to."""
        return any(slot.status > SlotStatus.FREE for slot in self.pool.slots)

    # What there is

    def rows(self) -> list[Row]:
        """All slots as they are now. A row that makes no sense is told, and given up."""
        held = self.shelf.held()
        found = []
        for slot in self.pool.slots:
            if slot.status is SlotStatus.ABSENT:
                continue
            try:
                facts = slot.read()
            except PoolDamaged as error:
                self._give_up(slot, error)
                continue
            owner = slot.owner
            found.append(
                Row(
                    index=slot.index,
                    status=facts.status,
                    state=facts.state,
                    rank=facts.rank,
                    is_own=facts.is_own,
                    writer=facts.writer,
                    owner=None if owner is None else owner.writer,
                    capacity_bytes=slot.capacity_bytes,
                    is_held=slot.index in held,
                    turn=facts.turn,
                )
            )
        return found

    def pinned(self) -> frozenset[State]:
        """The states that must stay."""
        present = {image.state for image in self.shelf.all()}
        return pinned_states(present, self.promise, self.tenure, self.is_settled, self.config.slots)

    def seat(self, rank: int) -> Seat | None:
        """The seat of `rank` in the present tenure, if it has entered and is there."""
        tenure = self.tenure
        if tenure is None:
            return None
        for seat in self.pool.seats:
            if seat.rank == rank and seat.generation == tenure.generation:
                return seat
        return None

    def agreed_acked(self, rank: int) -> int:
        """The newest step that all ranks have, by what `rank` (or any here) knows; -1: none."""
        seat = self.seat(rank)
        return -1 if seat is None else seat.agreed_acked

    # Promises and tenures

    def check_fence(self, generation: int, term: int) -> None:
        """Raise Stale if a newer generation, or a newer term, was promised."""
        with self.lock:
            check_fence(self.promise, generation, term, "the sender")

    def fence(self, generation: int, term: int, who: str) -> None:
        """From now on no rank of an older generation claims a slot. Raises Stale, Refusal."""
        with self.lock:
            promised(self.promise, generation, term, who)
            self.pool.header.raise_fence(generation)

    def give_promise(self, generation: int, term: int, who: str) -> None:
        """Promise; persisted on return. Raises Stale, Refusal."""
        with self.lock:
            promise = promised(self.promise, generation, term, who)
            self.pool.header.raise_fence(generation)
            if promise != self.promise:
                self._persist(promise, self.tenure, is_complete=self.is_complete)
                self.promise = promise
            self.apply_pins()

    def begin(self, tenure: Tenure) -> None:
        """A generation begins: its promise and tenure are persisted on return."""
        with self.lock:
            self.structures.keep(tenure.structure)
            self.pool.header.raise_fence(tenure.generation)
            promise = Promise(tenure.generation, tenure.term)
            self._persist(promise, tenure, is_complete=False)
            self.promise, self.tenure = promise, tenure
            self.is_complete = self.is_settled = False
            self._finished.clear()
            self._take_back()
            self._free_void(tenure)
            self.apply_pins()

    def complete(self) -> None:
        """All ranks of the tenure have entered, and memory is as it should be."""
        with self.lock:
            self.is_complete = True
            self._persist(self.promise, self.tenure, is_complete=True)

    def listen_at(self, address: str) -> None:
        """The data plane's address, for others to find in `keeper.json`."""
        with self.lock:
            self.address = address
            self._persist(self.promise, self.tenure, is_complete=self.is_complete)

    def apply_pins(self) -> None:
        """Write the pins into the table."""
        with self.lock:
            pinned = self.pinned()
            for image in self.shelf.all():
                slot = self.pool.slots[image.slot]
                if slot.pinned != (image.state in pinned):
                    (slot.pin if image.state in pinned else slot.unpin)()

    # The regular look

    def look(self) -> list[Row]:
        """See what ranks wrote into the table; the images that are to be sealed, in order."""
        with self.lock:
            for seat in self.pool.seats:
                if seat.is_taken:
                    seat.newest_seen += 1
            self._clear_shelf()
            if not self.is_settled and self.tenure is not None:
                self._settle(self.tenure)
            if not any(slot.status is SlotStatus.CAPTURED for slot in self.pool.slots):
                return []
            return rows_to_seal(self.rows(), self.promise)

    def shelve(self, shelved: Shelved, turn: int, *, is_new: bool) -> bool:
        """Put an image on the shelf whose slot has not changed since it had `turn`.

        `is_new`: it is CAPTURED, and becomes SEALED, an own one with its header. False, and
        nothing done, if it has changed, or a newer generation was promised meanwhile.
        """
        with self.lock:
            slot = self.pool.slots[shelved.slot]
            expected = SlotStatus.CAPTURED if is_new else SlotStatus.SEALED
            facts = slot.read()
            if facts.status is not expected or facts.turn != turn:
                return False
            if is_new:
                if shelved.state.generation < self.promise.generation:
                    return False
                if shelved.is_own:  # not before: the slot might be somebody else's by then
                    encoded = shelved.header.encoded
                    shelved.view[: len(encoded)] = encoded
                slot.values_sum = xxhash.xxh3_64_intdigest(slot.values)
                slot.sealed()
            if shelved.is_own:
                seat = self.seat(shelved.rank)
                if seat is not None and seat.generation == shelved.state.generation:
                    seat.sealed = max(seat.sealed, shelved.state.step)
            self.shelf.add(shelved)
            if shelved.state in self.pinned():
                slot.pin()
            return True

    def free(self, slot: Slot) -> None:
        """Free a slot that is the keeper's to free. Its image goes from the shelf."""
        with self.lock:
            for image in self.shelf.all():
                if image.slot == slot.index:
                    self.shelf.remove(image.state, image.rank)
            slot.free()

    def refuse(self, slot: Slot, facts: SlotFacts) -> None:
        """Free a slot whose captured image cannot be sealed, unless it has changed since."""
        with self.lock:
            if slot.status is SlotStatus.CAPTURED and slot.is_still(facts):
                self.lost(facts.rank, facts.state, facts.due)
                self.free(slot)

    # Reporter

    def acked(self, rank: int, step: int) -> None:
        """See `Reporter.acked`."""
        with self.lock:
            seat = self._reported(rank)
            if seat is not None:
                seat.acked = max(seat.acked, min(step, seat.sealed))

    def drained(self, rank: int, step: int) -> None:
        """See `Reporter.drained`."""
        with self.lock:
            seat = self._reported(rank)
            if seat is not None:
                seat.drained = max(seat.drained, step)

    def committed(self, state: State) -> None:
        """See `Reporter.committed`."""
        with self.lock:
            for seat in self.pool.seats:
                if seat.is_taken and seat.generation == state.generation:
                    seat.committed = max(seat.committed, state.step)

    def failed(self, rank: int) -> None:
        """See `Reporter.failed`."""
        with self.lock:
            seat = self.seat(rank)
            if seat is not None:
                seat.failures += 1

    def lost(self, rank: int, state: State, due: Due) -> None:
        """A captured state of own `rank` could not be sealed: all ranks must know; none waits."""
        with self.lock:
            seat = self.seat(rank)
            if seat is not None and seat.generation == state.generation:
                seat.lost = max(seat.lost, state.step)
                if due:
                    seat.drained = max(seat.drained, state.step)
                seat.failures += 1

    def superseded(self, generation: int) -> None:
        """See `Reporter.superseded`: the next capture of this host's ranks raises Stale."""
        self.pool.header.raise_fence(generation + 1)

    def event(self, kind: str, reason: str, **details: object) -> None:
        """See `Reporter.event`."""
        self.tell(kind, reason, **details)

    def close(self) -> None:
        """Close what is watched. The pool stays open, for the views that were handed out."""
        with self.lock:
            for pidfd in self._pidfds.values():
                os.close(pidfd)
            self._pidfds.clear()

    def _reported(self, rank: int) -> Seat | None:
        """The seat that a report is for; None if the report comes too late."""
        if self.tenure is None or self.promise.generation > self.tenure.generation:
            return None
        return self.seat(rank)

    def _take_up_tenure(self, record: KeeperRecord) -> None:
        saved = record.tenure
        if saved is None:
            return
        structure = self.structures.find(saved.structure)
        if structure is None:
            raise Refusal(
                f"{self.place.keeper_json} names the structure {saved.structure}, which is not in "
                f"{self.place.path}; free this host's memory with `keepstep clean`"
            )
        self.tenure = load_tenure(saved, self.config.job, self.config.host, structure)
        self.is_complete = saved.is_complete

    def _writers(self) -> set[Writer]:
        """All processes that the table names as owners of seats or slots."""
        seats = {seat.writer for seat in self.pool.seats if seat.is_taken}
        owners = {slot.owner.writer for slot in self.pool.slots if slot.owner is not None}
        return seats | owners

    def _go(self, writer: Writer) -> None:
        os.close(self._pidfds.pop(writer))
        self._alone_since_s = time.monotonic()

    def _take_back(self) -> None:
        """Take seats and slots from processes that are gone, and what they did not finish."""
        living = self.living
        for row in rows_to_free(self.rows(), self.promise, living):
            self.tell(
                "capture_lost",
                f"rank {row.rank} ended before its image was complete; the slot is free again",
                slot=row.index,
                rank=row.rank,
            )
            self.pool.slots[row.index].free()
        for slot in self.pool.slots:
            owner = slot.owner
            if owner is not None and owner.writer not in living:
                slot.unassign()
        for seat in self.pool.seats:
            if seat.is_taken and seat.writer not in living:
                seat.leave()

    def _free_void(self, tenure: Tenure) -> None:
        living = self.living
        for row in self._of(void_rows(self.rows(), self.pinned(), tenure)):
            if row.owner is None or row.owner not in living:
                self.free(self.pool.slots[row.index])

    def _of(self, indices: Sequence[int]) -> list[Row]:
        wanted = set(indices)
        return [row for row in self.rows() if row.index in wanted]

    def _clear_shelf(self) -> None:
        """Take images down whose slots their ranks have begun to write anew."""
        slots = self.pool.slots
        for image in self.shelf.all():
            slot = slots[image.slot]
            if slot.status is not SlotStatus.SEALED or slot.state != image.state:
                self.shelf.remove(image.state, image.rank)

    def _settle(self, tenure: Tenure) -> None:
        if any(self.agreed_acked(rank) >= 0 for rank in tenure.ranks):
            self.settle()

    def settle(self) -> None:
        """All ranks of the tenure are known to have a state of it: nothing is pinned any more."""
        with self.lock:
            self.is_settled = True
            self.apply_pins()

    def _give_up(self, slot: Slot, error: PoolDamaged) -> None:
        """Free a slot whose row makes no sense, unless a living process may be about to write."""
        owner = slot.owner
        if owner is not None and owner.writer in self.living:
            return
        self.tell("slot_damaged", str(error), slot=slot.index)
        slot.free()

    def _persist(self, promise: Promise, tenure: Tenure | None, *, is_complete: bool) -> None:
        record = KeeperRecord(
            address=self.address,
            pid=self.me.pid,
            ticks=self.me.ticks,
            generation=promise.generation,
            term=promise.term,
        )
        if tenure is not None:
            saved = save_tenure(tenure, is_complete=is_complete)
            record = msgspec.structs.replace(record, tenure=saved)
        record.write(self.place.keeper_json)

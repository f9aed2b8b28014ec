"""What the disk lane does with an image: write it, let older ones go, hand it to the store lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from keepstep.ckpt.disk_tier import DiskTier
from keepstep.ckpt.drain_jobs import Job, Jobs
from keepstep.ckpt.drain_queue import Ticket
from keepstep.ckpt.drain_telling import DrainTelling
from keepstep.ckpt.errors import Corrupt
from keepstep.ckpt.lane import Failure, Lane, Late
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due, Tier
from keepstep.storage.errors import StoreError

HANGING_TIMES = 4
"""After so many times of being late, what is due on the disk alone keeps its slot no more."""


class ToDisk:
    """A `LaneWork`.

    Args:
        disk: gives the disk tier, or raises StoreError.
        jobs: of this keeper.
        shelf: holds an image while it is written.
        store_lane: takes over what is due in the store.
        reporter: hears what goes wrong.
        verifiers: whose threads verify.
        give_up_s: after so long a failure the disk is not waited for.
    """

    def __init__(
        self,
        disk: Callable[[], DiskTier],
        jobs: Jobs,
        shelf: Shelf,
        store_lane: Lane,
        reporter: Reporter,
        verifiers: Executor,
        give_up_s: float,
    ) -> None:
        self._disk = disk
        self._jobs = jobs
        self._shelf = shelf
        self._store_lane = store_lane
        self._reporter = reporter
        self._telling = DrainTelling(reporter, Tier.DISK)
        self._verifiers = verifiers
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._promised = 0
        self._owners: tuple[Tenure, frozenset[int]] | None = None
        self._gave_up: set[Ticket] = set()

    def promised(self, generation: int) -> None:
        """See `Drains.promised`."""
        with self._lock:
            self._promised = max(self._promised, generation)

    def run(self, ticket: Ticket) -> bool:
        """See `LaneWork.run`."""
        job = self._jobs.find(ticket)
        if job is None:
            return False
        with self._lock:
            is_given_up = ticket in self._gave_up
            self._gave_up.discard(ticket)
        if not is_given_up and not self._put(job):
            if self._is_mine(job):
                self._jobs.end(ticket)
            return False
        if job.is_on_disk:
            self._jobs.release(ticket)
            self._retain()
        if self._is_mine(job):
            if Due.STORE in job.due:
                self._store_lane.add(ticket)
            else:
                self._jobs.end(ticket)
        return job.is_on_disk

    def late(self, late: Late) -> Collection[Ticket]:
        """An `OnLate`: a disk that hangs, or crawls, holds up neither the store nor slots for ever.

        What is due in the store goes there from its slot, and the disk may have it later. What is
        due on the disk alone keeps its slot for a while.
        """
        then = "what is due in the store too goes there from memory"
        is_hanging = late.times >= HANGING_TIMES
        if is_hanging:
            then += "; slots may be used for newer states"
        if late.times & (late.times - 1) == 0:
            self._telling.late(late, then)
        passed = []
        for ticket in (late.ticket, *late.waiting):
            job = self._jobs.find(ticket)
            if job is None:
                passed.append(ticket)
            elif Due.STORE in job.due:
                if self._is_mine(job):
                    self._store_lane.add(ticket)
                passed.append(ticket)
            elif is_hanging:
                self._jobs.release(ticket)
                passed.append(ticket)
        return passed

    def dropped(self, ticket: Ticket) -> None:
        """See `LaneWork.dropped`."""
        self._telling.superseded(ticket)
        with self._lock:
            self._gave_up.discard(ticket)
        job = self._jobs.find(ticket)
        if job is not None and self._is_mine(job):
            self._jobs.end(ticket)

    def failed(self, failure: Failure) -> None:
        """See `LaneWork.failed`."""
        self._telling.failed(failure)
        if failure.failing_s < self._give_up_s:
            return
        with self._lock:
            fresh = [ticket for ticket in failure.waiting if ticket not in self._gave_up]
            self._gave_up.update(fresh)
        if fresh:
            then = "they go to the store from memory if they are due there, or nowhere"
            self._telling.gave_up(failure, fresh, then)

    def recovered(self, tries: int, failing_s: float) -> None:
        """See `LaneWork.recovered`."""
        self._telling.recovered(tries, failing_s)

    def _is_mine(self, job: Job) -> bool:
        """Whether the job goes on, or ends, where this is asked: it does so once."""
        with self._lock:
            is_handed, job.is_handed = job.is_handed, True
        return not is_handed

    def _put(self, job: Job) -> bool:
        """Whether the disk has the image; if not, it never will."""
        shelved = self._image(job)
        with self._shelf.hold(shelved) as is_there:
            if not is_there:
                self._telling.lost(shelved)
                return False
            try:
                self._disk().put(shelved, self._verifiers, lambda: job.needs_slot)
            except Corrupt as error:
                if job.needs_slot:
                    self._telling.corrupt(shelved, error, Tier.MEMORY)
                else:
                    self._telling.lost(shelved)  # written over, by right
                return False
        job.is_on_disk = True
        return True

    def _image(self, job: Job) -> Shelved:
        """The image, with its memory if that is still there."""
        shelved = job.shelved
        if job.needs_slot:
            return shelved
        found = self._shelf.find(shelved.state, shelved.rank)
        return found if found is not None and found.record == shelved.record else shelved

    def _retain(self) -> None:
        """Let go of older states, as the policy says. What fails now is done the next time."""
        tenure = self._jobs.tenure
        with self._lock:
            if tenure is None or tenure.generation < self._promised:
                return
        protected = {ticket.state for ticket in self._store_lane.tickets()}
        try:
            self._disk().retain(tenure, self._owners_of(tenure), protected)
        except StoreError as error:
            self._reporter.event("retention_failed", str(error), tier=Tier.DISK.value)

    def _owners_of(self, tenure: Tenure) -> frozenset[int]:
        """The ranks of this host that have an image. Slow for many tensors: asked once."""
        with self._lock:
            known = self._owners
        if known is None or known[0] is not tenure:
            structure = tenure.structure
            plan = Plan(structure.mesh, structure.placements, structure.tensors)
            known = tenure, frozenset(rank for rank in tenure.ranks if plan.owned(rank))
            with self._lock:
                self._owners = known
        return known[1]

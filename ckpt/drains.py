"""The drains: sealed images of this host on their way to its disk and to the store. A service.

An image that is due on both goes to the disk, and from there to the store, so that it needs its
slot for as short a time as can be. Nothing here is waited for by a rank: a store that is slow, or
fails for hours, costs lag, which is reported, and newer states take the place of those that have
not begun.

`drained` is told for an image when the disk has it; without a disk, when the store has it, or when
the store has failed for so long that memory is worth more to newer states. Then it is still tried
while it lies where it was. A disk that hangs is gone past: what is due in the store goes there from
memory, and whichever has it first lets the slot go. What the other then takes is compared again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepstep.ckpt.committer import Committer
from keepstep.ckpt.disk_tier import DiskTier
from keepstep.ckpt.drain_jobs import Jobs, without_memory
from keepstep.ckpt.lane import Lane
from keepstep.ckpt.once import Once
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due
from keepstep.ckpt.to_disk import ToDisk
from keepstep.ckpt.to_store import ToStore
from keepstep.storage.store import Store

DISK_WRITERS = 2
"""One stream does not quite fill a disk; more than two only make it seek and sync."""

UPLOADS = 4

PAUSES_IN_PATIENCE = 10
"""The longest pause after failures is this part of a patience: a run that waits at its end for one
patience finds out in time that a store has been mended."""

DISK_PARTS = 5
"""A disk that fails, or hangs, for this part of a patience is not waited for any more: a run that
waits at its end for one patience must not fail over copies that it can do without."""

LATE_MIN_S = 0.5
"""No disk is called slow before: to make a small file durable may take that on a busy one."""

_VERIFIERS = 2


class Drains:
    """Disk tier, store tier and commits of one host.

    Args:
        open_store: gives the durable store, or raises StoreError; called again until it does.
        open_disk: gives the store on this host's disk, likewise; None for no disk tier.
        shelf: where images are held while they are read.
        reporter: hears how far ranks' slots are free, of commits, and of all that goes wrong.
        job: the job's name.
        patience_s: after so long a failure the store is not waited for any more with a slot, and
            the disk after a part of it.
        compresses: whether images are encoded on their way to the store, where that pays.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        open_disk: Callable[[], Store] | None,
        shelf: Shelf,
        reporter: Reporter,
        *,
        job: str,
        patience_s: float,
        compresses: bool = False,
    ) -> None:
        self._verifiers = ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="keepstep-verify")
        self._jobs = Jobs(reporter)
        store = Once(open_store)
        disk = None if open_disk is None else Once(lambda: DiskTier(open_disk()))
        self._committer = Committer(store, job, reporter, poll_max_s=max(patience_s / 5, 0.1))
        self._to_store = ToStore(
            store,
            disk,
            self._jobs,
            shelf,
            self._committer,
            reporter,
            self._verifiers,
            patience_s,
            compresses,
        )
        pause_max_s = patience_s / PAUSES_IN_PATIENCE
        self._store_lane = Lane("upload", UPLOADS, self._to_store, pause_max_s)
        self._disk_lane: Lane | None = None
        self._to_disk: ToDisk | None = None
        if disk is not None:
            self._to_disk = ToDisk(
                disk,
                self._jobs,
                shelf,
                self._store_lane,
                reporter,
                self._verifiers,
                patience_s / DISK_PARTS,
            )
            self._disk_lane = Lane(
                "disk",
                DISK_WRITERS,
                self._to_disk,
                pause_max_s,
                late_s=max(patience_s / DISK_PARTS, LATE_MIN_S),
                on_late=self._to_disk.late,
            )

    def enter(self, tenure: Tenure) -> None:
        """See `Service.enter`. What is void or can never be committed any more is let go."""
        number = tenure.generation
        floor = -1 if tenure.base is None else tenure.base.step
        self._jobs.enter(tenure)
        for lane in self._lanes():
            lane.enter(is_alone=len(tenure.addresses) == 1)
        self._store_lane.drop(lambda state: state.generation < number)
        if self._disk_lane is not None:
            self._disk_lane.drop(lambda state: state.generation < number and state.step > floor)
        self._committer.enter(tenure)

    def promised(self, generation: int) -> None:
        """What is on the disk was listed for `generation`: nothing goes before that has begun."""
        if self._to_disk is not None:
            self._to_disk.promised(generation)

    def sealed(self, shelved: Shelved) -> None:
        """See `Service.sealed`."""
        tenure = self._jobs.tenure
        if tenure is None:
            return
        due = shelved.due
        if shelved.state.generation == tenure.generation:
            self._jobs.note(shelved.state)
        else:
            due &= ~Due.STORE  # only the newest generation commits
        if self._disk_lane is None:
            due &= ~Due.DISK
        if not shelved.due:
            return
        ticket = self._jobs.add(shelved, due)
        if ticket is None:
            return
        if not due:
            self._jobs.end(ticket)
            return
        if Due.STORE in due:
            self._committer.expect(without_memory(shelved))
        if Due.DISK in due and self._disk_lane is not None:
            self._disk_lane.add(ticket)
        else:
            self._store_lane.add(ticket)

    def close(self, timeout_s: float) -> None:
        """See `Service.close`. Commits are waited for too."""
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes():
            lane.drain(deadline_s)
        self._committer.drain(deadline_s)
        for lane in self._lanes():
            lane.close(deadline_s)
        self._committer.close(deadline_s)
        self._verifiers.shutdown(wait=False)
        self._jobs.clear()

    def _lanes(self) -> list[Lane]:
        """In the order in which an image goes through them."""
        return [lane for lane in (self._disk_lane, self._store_lane) if lane is not None]

    def status(self) -> dict[str, object]:
        """See `Service.status`: for each tier what waits, how far slots are free, and the lag."""
        newest = self._jobs.newest
        committed = self._committer.status()
        step = committed["committed_step"]
        assert isinstance(step, int)
        return {
            "disk": None if self._disk_lane is None else self._disk_lane.status(),
            "store": self._store_lane.status(),
            "commit": committed,
            "drained_steps": {str(rank): level for rank, level in self._jobs.levels().items()},
            "lag_steps": 0 if newest is None else newest.step - max(step, 0),
        }

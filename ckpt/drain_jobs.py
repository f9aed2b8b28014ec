"""Images on their way, and which of them need their slots. Thread-safe; nothing here blocks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from keepstep.ckpt.drain_queue import SlotNeeds, Ticket
from keepstep.ckpt.manifest import State
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due


@dataclass(slots=True)
class Job:
    """One image on its way.

    Attributes:
        shelved: the image; without its memory once it needs its slot no more.
        due: where it goes.
        is_on_disk: whether the disk has it.
        needs_slot: whether its rank must not write over it.
        is_handed: whether the store lane has it; then that ends the job.
    """

    shelved: Shelved
    due: Due
    is_on_disk: bool = False
    needs_slot: bool = True
    is_handed: bool = False


def without_memory(shelved: Shelved) -> Shelved:
    """The same image's record, header and description, without a hold on the pool's memory."""
    return replace(shelved, view=memoryview(b""))


class Jobs:
    """All jobs of one keeper. `reporter` hears how far each rank's slots are free."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._lock = threading.Lock()
        self._tenure: Tenure | None = None
        self._jobs: dict[Ticket, Job] = {}
        self._needs: dict[int, SlotNeeds] = {}
        self._sealed: State | None = None

    @property
    def tenure(self) -> Tenure | None:
        """The generation that is served."""
        return self._tenure

    @property
    def newest(self) -> State | None:
        """The newest state that was sealed here in the tenure."""
        return self._sealed

    def enter(self, tenure: Tenure) -> None:
        """Slots of another generation are counted anew."""
        with self._lock:
            if self._tenure is None or self._tenure.generation != tenure.generation:
                self._needs = {}
                self._sealed = None
            self._tenure = tenure

    def note(self, state: State) -> None:
        """A state of the tenure was sealed, due or not."""
        with self._lock:
            if self._sealed is None or state > self._sealed:
                self._sealed = state

    def add(self, shelved: Shelved, due: Due) -> Ticket | None:
        """One more job; None if it is there already."""
        ticket = Ticket(shelved.state, shelved.rank)
        with self._lock:
            if ticket in self._jobs:
                return None
            self._jobs[ticket] = Job(shelved, due)
            if self._is_counted(ticket):
                self._needs.setdefault(ticket.rank, SlotNeeds()).need(ticket.state.step)
        return ticket

    def find(self, ticket: Ticket) -> Job | None:
        """The job, unless it has ended."""
        with self._lock:
            return self._jobs.get(ticket)

    def release(self, ticket: Ticket) -> None:
        """The image needs its slot no more. May be called again."""
        with self._lock:
            job = self._jobs.get(ticket)
            if job is None or not job.needs_slot:
                return
            job.needs_slot = False
            job.shelved = without_memory(job.shelved)
            if not self._is_counted(ticket):
                return
            needs = self._needs.setdefault(ticket.rank, SlotNeeds())
            # Told under the lock, so that levels are told in order; the reporter does not block.
            if needs.release(ticket.state.step):
                self._reporter.drained(ticket.rank, needs.level)

    def end(self, ticket: Ticket) -> None:
        """The job has ended, well or not; its slot is free."""
        self.release(ticket)
        with self._lock:
            self._jobs.pop(ticket, None)

    def clear(self) -> None:
        """Let go of all jobs, and of the memory they refer to. Nothing is told."""
        with self._lock:
            self._jobs.clear()

    def levels(self) -> dict[int, int]:
        """Of each rank, the step up to which slots are free."""
        with self._lock:
            return {rank: needs.level for rank, needs in sorted(self._needs.items())}

    def _is_counted(self, ticket: Ticket) -> bool:
        return self._tenure is not None and ticket.state.generation == self._tenure.generation

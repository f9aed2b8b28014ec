"""What the store lane does with an image: upload it and its done record, and tell the committer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from keepstep.ckpt.checked_stream import MemoryStream
from keepstep.ckpt.committer import Committer
from keepstep.ckpt.disk_tier import DiskTier
from keepstep.ckpt.drain_jobs import Job, Jobs
from keepstep.ckpt.drain_queue import Ticket
from keepstep.ckpt.drain_telling import DrainTelling
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.lane import Failure
from keepstep.ckpt.manifest import DoneRecord
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelf
from keepstep.ckpt.store_tier import StoreTier
from keepstep.ckpt.tiers import Tier
from keepstep.storage.store import Store


class _CameToDiskError(Exception):
    """Memory was written over since a late disk has the image. Never leaves this file."""


class ToStore:
    """A `LaneWork`.

    Args:
        store: gives the store, or raises StoreError.
        disk: gives the disk tier, likewise; None if there is none.
        jobs: of this keeper.
        shelf: holds an image while it is read from memory.
        committer: hears what is done.
        reporter: hears what goes wrong.
        verifiers: whose threads verify.
        patience_s: after so long a failure the store is not waited for with a slot.
        compresses: whether images are encoded where that pays.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        disk: Callable[[], DiskTier] | None,
        jobs: Jobs,
        shelf: Shelf,
        committer: Committer,
        reporter: Reporter,
        verifiers: Executor,
        patience_s: float,
        compresses: bool,
    ) -> None:
        self._store = store
        self._disk = disk
        self._jobs = jobs
        self._shelf = shelf
        self._committer = committer
        self._telling = DrainTelling(reporter, Tier.STORE)
        self._verifiers = verifiers
        self._patience_s = patience_s
        self._compresses = compresses

    def run(self, ticket: Ticket) -> bool:
        """See `LaneWork.run`."""
        job = self._jobs.find(ticket)
        if job is None:
            return False
        record = job.shelved.record
        tier = StoreTier(self._store(), self._compresses)
        done = None
        try:
            done = tier.settled(ticket.state, record) or self._upload(tier, ticket, job)
        except FormatError as error:
            self._telling.refused(ticket, error)
        if done is not None:
            self._committer.done(ticket.state, done)
        else:
            self._committer.forget(ticket.state)
        self._jobs.end(ticket)
        return done is not None

    def dropped(self, ticket: Ticket) -> None:
        """See `LaneWork.dropped`."""
        self._telling.superseded(ticket)
        self._committer.forget(ticket.state)
        self._jobs.end(ticket)

    def failed(self, failure: Failure) -> None:
        """See `LaneWork.failed`."""
        self._telling.failed(failure)
        if failure.failing_s < self._patience_s:
            return
        jobs = ((ticket, self._jobs.find(ticket)) for ticket in failure.waiting)
        held = [ticket for ticket, job in jobs if job is not None and job.needs_slot]
        if held:
            then = "their slots may be used for a newer state; they are tried while they are there"
            self._telling.gave_up(failure, held, then)
        for ticket in held:
            self._jobs.release(ticket)

    def recovered(self, tries: int, failing_s: float) -> None:
        """See `LaneWork.recovered`."""
        self._telling.recovered(tries, failing_s)

    def _upload(self, tier: StoreTier, ticket: Ticket, job: Job) -> DoneRecord | None:
        """Have the image in the store; None: it never will be there."""
        if job.is_on_disk and self._disk is not None:
            shelved = job.shelved
            stream = self._disk().stream(shelved)
            try:
                return tier.put(ticket.state, shelved.record, shelved.header, stream)
            except Corrupt as error:
                self._telling.corrupt(shelved, error, Tier.DISK)
            return self._upload_from_memory(tier, ticket)
        try:
            return self._upload_from_memory(tier, ticket)
        except _CameToDiskError:
            return self._upload(tier, ticket, job)

    def _upload_from_memory(self, tier: StoreTier, ticket: Ticket) -> DoneRecord | None:
        job = self._jobs.find(ticket)
        if job is None:
            self._telling.missing(ticket)
            return None
        was_on_disk = job.is_on_disk
        shelved = self._shelf.find(ticket.state, ticket.rank)
        if shelved is None or shelved.record != job.shelved.record:
            if job.is_on_disk and not was_on_disk:
                raise _CameToDiskError
            self._telling.missing(ticket)
            return None
        with self._shelf.hold(shelved) as is_there:
            if not is_there:
                if job.is_on_disk and not was_on_disk:
                    raise _CameToDiskError
                self._telling.missing(ticket)
                return None
            key = image_key(ticket.state, ticket.rank)
            stream = MemoryStream(
                shelved.view, shelved.header, shelved.record, key, self._verifiers
            )

            def check() -> None:
                # Without the slot, the image may have been written over while it was sent.
                if not job.needs_slot:
                    stream.verify()

            try:
                return tier.put(ticket.state, shelved.record, shelved.header, stream, check)
            except Corrupt as error:
                if job.is_on_disk and not was_on_disk:
                    raise _CameToDiskError from error
                self._telling.corrupt(shelved, error, Tier.MEMORY)
                return None

"""Saving while training goes on: capture, write behind, commit when all ranks have written.

A save blocks a step for one memory copy. The write goes on in a thread; that all ranks are done
rides on the step's own reduction, and on that step the ranks exchange their records and rank 0
commits. A save that fails anywhere is told and forgotten: the commit before it stays good, and
training goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from keepstep.ckpt.agree import all_gather_bytes
from keepstep.ckpt.commit import commit
from keepstep.ckpt.errors import CheckpointError, Superseded
from keepstep.ckpt.gc import collect
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import FORMAT_VERSION, ImageRecord, Manifest, State
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.save import Saver
from keepstep.ckpt.structure import Structure
from keepstep.storage.errors import StoreError
from keepstep.storage.store import Store

Tell = Callable[..., None]
"""`tell(kind, reason, **details)`: an event of rank 0; does nothing elsewhere."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one rank's write.

    Attributes:
        image: its record; None if the rank owns nothing, or failed.
        problem: what went wrong, in words; "" if nothing did.
        errno: of the system, if it gave one.
    """

    image: ImageRecord | None = None
    problem: str = ""
    errno: int | None = None


@dataclass(slots=True)
class _Pending:
    state: State
    values: dict[str, object]
    started_s: float


class Checkpointing:
    """Saves one rank's share, in step with the other ranks."""

    def __init__(
        self,
        saver: Saver,
        structure: Structure,
        store: Store,
        *,
        job_name: str,
        generation: int,
        log: Log | None,
        policy: Policy,
        control: dist.ProcessGroup | None,
        tell: Tell,
        last: State | None,
    ) -> None:
        """Ready to save.

        Args:
            saver: of this rank.
            structure: of all ranks.
            store: where the saver writes.
            job_name: the store's job.
            generation: under which states are named.
            log: on rank 0, with its term taken; None on the others.
            policy: what retention keeps.
            control: a group that moves CPU tensors; None is the default group.
            tell: makes an event.
            last: the newest good commit.
        """
        self._saver = saver
        self._structure = structure
        self._store = store
        self._job_name = job_name
        self._generation = generation
        self._log = log
        self._policy = policy
        self._control = control
        self._tell = tell
        self.last = last
        self._last_s = time.monotonic()
        self._pending: _Pending | None = None
        self.last_problem = ""

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write; for the step's reduction (`min`)."""
        return self._pending is None or self._saver.poll()

    @property
    def is_pending(self) -> bool:
        """Whether a save is going on: the same on all ranks."""
        return self._pending is not None

    def save(self, step: int) -> float:
        """Capture the state after `step` and begin to write it; the milliseconds it blocked.

        A save that is still going on is waited for and finished first, and that is told.
        Collective only then.
        """
        started_s = time.monotonic()
        if self._pending is not None:
            before = self._pending.state
            self.finish()
            waited_ms = (time.monotonic() - started_s) * 1e3
            self._tell(
                "checkpoint_waited",
                f"the save of step {before.step} was still going on when that of step {step} was "
                f"due: waited {waited_ms:.0f} ms; save less often, or to a faster store",
                step=step,
                waited_ms=waited_ms,
            )
        state = State(self._generation, step)
        values = self._saver.capture(state)
        self._saver.start()
        self._pending = _Pending(state, values, started_s)
        return (time.monotonic() - started_s) * 1e3

    def finish(self) -> bool:
        """Wait for this rank's write, exchange outcomes, commit on rank 0. Collective.

        Returns whether the commit was made: the same on all ranks.

        Raises:
            Superseded: on rank 0, if a newer run has taken over.
        """
        pending = self._pending
        assert pending is not None
        self._pending = None
        mine = self._take_outcome()
        outcomes = self._exchange(mine)
        problems = [
            f"rank {rank}: {one.problem}" for rank, one in enumerate(outcomes) if one.problem
        ]
        errno = next((one.errno for one in outcomes if one.errno is not None), None)
        if problems and mine.image is not None:
            self._discard(pending.state, mine.image.rank)
        if not problems:
            made = self._exchange(self._commit(pending, outcomes))[0]
            problems, errno = [made.problem] if made.problem else [], made.errno
        if problems:
            self._tell_failure(pending.state, problems[0], errno)
            return False
        self.last, self._last_s = pending.state, time.monotonic()
        self.last_problem = ""
        return True

    def collect(self, *, leftovers_only: bool = False) -> None:
        """Let retention take what it may, on rank 0; a store or log that refuses is told, no more.

        Raises:
            Superseded: as `finish`.
        """
        if self._log is None:
            return
        try:
            policy = Policy(keep_last=0) if leftovers_only else self._policy
            report = collect(self._log, policy, is_thorough=False)
        except Superseded:
            raise
        except (StoreError, CheckpointError) as error:
            self._tell("retention_failed", str(error))
            return
        if report.retired:
            steps = [state.step for state in report.retired]
            states = [[state.generation, state.step] for state in report.retired]
            self._tell("retired", f"retention: {self._policy}", steps=steps, states=states)

    def close(self) -> None:
        """Free the saver's thread and memory."""
        self._saver.close()

    def _take_outcome(self) -> Outcome:
        try:
            return Outcome(self._saver.wait())
        except StoreError as error:
            return Outcome(problem=str(error), errno=error.errno)
        except CheckpointError as error:
            return Outcome(problem=str(error))

    def _discard(self, state: State, rank: int) -> None:
        """Delete this rank's image of a save that failed before anybody tried to commit it.

        Else failed saves would fill a store that is short of space, and the next would fail too.
        """
        with contextlib.suppress(StoreError):  # what stays is unreferenced, and gc takes it later
            self._store.delete(image_key(state, rank))

    def _exchange(self, outcome: Outcome) -> list[Outcome]:
        said = all_gather_bytes(self._control, msgspec.json.encode(outcome))
        return [msgspec.json.decode(data, type=Outcome) for data in said]

    def _commit(self, pending: _Pending, outcomes: Sequence[Outcome]) -> Outcome:
        """Rank 0: write the manifest and append the commit. Nothing on the others."""
        if self._log is None:
            return Outcome()
        images = tuple(one.image for one in outcomes if one.image is not None)
        manifest = self._manifest(pending, images)
        try:
            record = commit(self._log, manifest)
        except Superseded:
            raise
        except StoreError as error:
            return Outcome(problem=str(error), errno=error.errno)
        except CheckpointError as error:
            return Outcome(problem=str(error))
        took_s = time.monotonic() - pending.started_s
        step = pending.state.step
        self._tell(
            "checkpoint_committed",
            f"step {step} is durable in {self._log.store.url} (entry {record.seq}), "
            f"{took_s:.2f} s after its capture began",
            step=step,
            generation=pending.state.generation,
            size_bytes=sum(image.size_bytes for image in images),
            took_s=took_s,
        )
        return Outcome()

    def _manifest(self, pending: _Pending, images: tuple[ImageRecord, ...]) -> Manifest:
        return Manifest(
            format=FORMAT_VERSION,
            job=self._job_name,
            state=pending.state,
            mesh=self._structure.mesh,
            placements=self._structure.placements,
            tensors=self._structure.tensors,
            aliases=self._structure.aliases,
            values=pending.values,
            plan_digest=self._structure.digest,
            images=tuple(sorted(images, key=lambda image: image.rank)),
        )

    def _tell_failure(self, state: State, problem: str, errno: int | None) -> None:
        age_s = time.monotonic() - self._last_s
        last = "there is no good commit yet"
        if self.last is not None:
            last = f"the last good commit is step {self.last.step}, {age_s:.0f} s old"
        self.last_problem = problem
        self._tell(
            "checkpoint_failed",
            f"step {state.step} was not saved: {problem}; {last}; training goes on",
            step=state.step,
            errno=errno,
            last_good_step=None if self.last is None else self.last.step,
            last_good_age_s=age_s,
        )

"""Capturing at every step, in step with the other ranks, and seeing to it that the last is saved.

What all ranks must decide alike rides on the step's reduction: how far the images of all are, and
where the state after this step is due (rank 0 looks at the clock for all). Everything beyond
memory is the keepers' work; here it is only watched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from keepstep.ckpt.agree import all_gather_bytes
from keepstep.ckpt.manifest import State
from keepstep.ckpt.slots import Level, agree
from keepstep.ckpt.snapshots import Captured, Snapshots
from keepstep.ckpt.tiers import Due, Tiers
from keepstep.trainer.errors import NotSaved
from keepstep.trainer.reduction import Entry

Tell = Callable[..., None]
"""`tell(kind, reason, **details)`: an event of this rank."""

_POLL_S = 0.05
_TOLD_AFTER_S = 2.0
"""Waiting that takes longer is told: a person thinks that the run hangs."""
_TOLD_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Lag:
    """How far what is durable is behind.

    Attributes:
        blocked_ms: what this step lost to its capture and the one before.
        captured: whether the state after the step was captured.
        steps: since the newest commit, or since the beginning.
        seconds: since that state was captured, or since the beginning.
    """

    blocked_ms: float
    captured: bool
    steps: int
    seconds: float


class _Standing(msgspec.Struct, frozen=True):
    """What a rank says of itself at the end."""

    level: Level
    committed: int
    failures: int


class Capturing:
    """One rank's captures in one generation."""

    def __init__(
        self,
        snapshots: Snapshots,
        tiers: Tiers,
        *,
        generation: int,
        committed: int,
        control: dist.ProcessGroup | None,
        tell: Tell,
        tell_first: Tell,
        is_first: bool,
    ) -> None:
        """Ready for the first step.

        Args:
            snapshots: of this rank, opened.
            tiers: the policy.
            generation: under which states are named.
            committed: the newest commit on the lineage; -1: none.
            control: a group that moves CPU tensors; None is the default group.
            tell: makes an event of this rank.
            tell_first: makes an event on rank 0, which tells for all; does nothing elsewhere.
            is_first: rank 0, which decides what goes by the clock.
        """
        self._snapshots = snapshots
        self._tiers = tiers
        self._generation = generation
        self._control = control
        self._tell, self._tell_first = tell, tell_first
        self._is_first = is_first
        now_s = time.monotonic()
        self._disk_s = self._store_s = now_s
        self._captured_s = {max(committed, 0): now_s}
        self._pending_due = -1
        self._skipped = 0
        self.committed = committed
        """The newest committed step that this rank has heard of; -1: none."""

    def entries(self, step: int) -> dict[str, Entry]:
        """What the reduction of `step` carries for its capture."""
        level = self._snapshots.level()
        due = Due.NOWHERE
        if self._is_first:
            now_s = time.monotonic()
            due = self._tiers.due(step, now_s - self._disk_s, now_s - self._store_s)
        return {
            "acked": ("min", float(level.acked)),
            "drained": ("min", float(level.drained)),
            "lost": ("max", float(level.lost)),
            "committed": ("max", float(self._snapshots.committed)),
            "due": ("max", float(due)),
        }

    def capture(self, step: int, reduced: Mapping[str, float]) -> Lag:
        """Capture the state after `step`, if it is to be. Returns at once."""
        self._hear(int(reduced["committed"]))
        self._take_problems()
        due = Due(int(reduced["due"]))
        if not self._tiers.is_captured(step, due):
            return self.lag(step, captured=False)
        agreed = Level(int(reduced["acked"]), int(reduced["drained"]), int(reduced["lost"]))
        made = self._capture(step, due, agreed)
        return self.lag(step, made.blocked_ms, captured=not made.skipped)

    def save_last(self, step: int, patience_s: float, way_out: str = "Ctrl-C twice") -> None:
        """Capture the state after `step`, the last, and wait until it is committed. Collective.

        Waits until memory is free for it and no older state is still on its way, as long as
        something gets on. Waiting of more than a moment is told (`waiting`).

        Args:
            step: the last.
            patience_s: so long may nothing get on.
            way_out: what a person does who will not wait.

        Raises:
            NotSaved: nothing has got on for `patience_s`; on all ranks alike.
        """
        waiting = _Waiting(patience_s, way_out)
        standing = self._stand()
        while standing.level.drained < self._pending_due or self._is_skipped_last(step, standing):
            self._wait_on(waiting, standing, step, "memory is still in use for older states")
            standing = self._stand()
        self._snapshots.wait()
        self._take_problems()
        waiting.begin_again()
        while (standing := self._stand()).committed < step:
            self._wait_on(waiting, standing, step, "not all of its images are in the store")
        self._hear(standing.committed)

    # ---- one capture

    def _is_skipped_last(self, step: int, standing: _Standing) -> bool:
        """Capture the last state, or be told that there is no slot yet."""
        return bool(self._capture(step, Due.STORE, standing.level).skipped)

    def _capture(self, step: int, due: Due, agreed: Level) -> Captured:
        now_s = time.monotonic()
        made = self._snapshots.capture(State(self._generation, step), due, agreed)
        if due & Due.DISK:
            self._disk_s = now_s
        if due & Due.STORE:
            self._store_s = now_s
        if made.skipped:
            self._skip(step, due, made.skipped)
            return made
        if self._skipped:
            self._tell_first(
                "capturing_again",
                f"step {step} is captured, after {self._skipped} that were not",
                step=step,
                skipped=self._skipped,
            )
            self._skipped = 0
        if made.due:
            self._pending_due = step
        if made.due & Due.STORE:
            self._captured_s[step] = now_s
        if made.put_off:
            where = _tiers_in(made.put_off)
            self._tell_first(
                "put_off",
                f"step {step} was due in {where}, and a later one goes there instead: "
                f"{made.reason}; write less often, or to something faster",
                step=step,
                tiers=where,
            )
        self._tell_choice()
        return made

    def _skip(self, step: int, due: Due, reason: str) -> None:
        """Count a capture that was not made; tell the first of several in a row, or a due one."""
        if not self._skipped or due:
            lost = f", which was due in {_tiers_in(due)}," if due else ""
            self._tell_first(
                "capture_skipped", f"step {step}{lost} is not captured: {reason}", step=step
            )
        self._skipped += 1

    def _take_problems(self) -> None:
        """Tell what failed on this rank, whichever it is."""
        for state, why in self._snapshots.take_problems():
            self._tell(
                "capture_failed",
                f"step {state.step} has no image of this rank: {why}; training goes on",
                step=state.step,
            )

    def _tell_choice(self) -> None:
        choice = self._snapshots.take_choice()
        if choice:
            self._tell_first("capture_mode", choice)

    # ---- what is durable

    def _hear(self, committed: int) -> None:
        if committed <= self.committed:
            return
        self.committed = committed
        for step in [step for step in self._captured_s if step < committed]:
            del self._captured_s[step]

    def lag(self, step: int, blocked_ms: float = 0.0, *, captured: bool = True) -> Lag:
        """How far behind what is durable was when `step` was done."""
        since_s = min(self._captured_s.values(), default=time.monotonic())
        return Lag(
            blocked_ms=blocked_ms,
            captured=captured,
            steps=step - max(self.committed, 0),
            seconds=time.monotonic() - since_s,
        )

    def _stand(self) -> _Standing:
        """How far all ranks are. Collective."""
        mine = _Standing(
            level=self._snapshots.level(),
            committed=self._snapshots.committed,
            failures=self._snapshots.failures,
        )
        said = [
            msgspec.json.decode(data, type=_Standing)
            for data in all_gather_bytes(self._control, msgspec.json.encode(mine))
        ]
        return _Standing(
            level=agree(one.level for one in said),
            committed=max(one.committed for one in said),
            failures=sum(one.failures for one in said),
        )

    def _wait_on(self, waiting: _Waiting, standing: _Standing, step: int, why: str) -> None:
        """Pause, and tell of it; raise NotSaved on all ranks if rank 0 has waited long enough."""
        is_over = waiting.is_over((standing.level, standing.committed))
        said = all_gather_bytes(self._control, str(int(is_over)).encode())
        if int(said[0]):
            last = "none" if standing.committed < 0 else f"step {standing.committed}"
            raise NotSaved(
                f"stopped at step {step}, which could not be saved: {why}, and nothing has got on "
                f"for {waiting.patience_s:.0f} s ({standing.failures} failures of keepers, see "
                f"events.jsonl); the last good commit is {last}. The newest states stay in "
                f"memory for {waiting.patience_s:.0f} s, and on the hosts' disks: mend the store, "
                "and give the same command again",
                step=step,
            )
        if waiting.is_to_be_told():
            self._tell_first(
                "waiting",
                f"waiting for step {step} to be durable: {why} (at most {waiting.patience_s:.0f} s "
                f"without progress; {waiting.way_out}: leave it in memory)",
                step=step,
            )
        time.sleep(_POLL_S)


class _Waiting:
    """Waiting while something gets on."""

    def __init__(self, patience_s: float, way_out: str) -> None:
        self.patience_s = patience_s
        self.way_out = way_out
        self._tell_at_s = time.monotonic() + _TOLD_AFTER_S
        self.begin_again()

    def begin_again(self) -> None:
        """Wait for something else from now on, with all patience; it has been told no less."""
        self._standing: object = None
        self._since_s = time.monotonic()

    def is_over(self, standing: object) -> bool:
        """Whether `standing` has been the same for longer than patience."""
        now_s = time.monotonic()
        if standing != self._standing:
            self._standing, self._since_s = standing, now_s
        return now_s - self._since_s > self.patience_s

    def is_to_be_told(self) -> bool:
        """Whether a person should hear of it now: after a moment, and from time to time."""
        now_s = time.monotonic()
        is_due = now_s >= self._tell_at_s
        if is_due:
            self._tell_at_s = now_s + _TOLD_EVERY_S
        return is_due


def _tiers_in(due: Due) -> str:
    return " and ".join(str(tier.name).lower() for tier in Due if tier in due and tier)

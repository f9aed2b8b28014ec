"""One rank's side of the captures: a state copied into a slot of the pool at (nearly) every step.

Nothing here waits for a keeper, a peer, a disk or a store. The keeper is reached through the pool's
table alone: a slot that is CAPTURED is the keeper's, and what became of it is read from the seat.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.ckpt.control import Entered
from keepstep.ckpt.manifest import State
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slots import Level
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Due


@dataclass(frozen=True, slots=True)
class Captured:
    """What one call of `capture` did.

    Attributes:
        call_ms: how long the call took.
        guard_ms: how long the update guard held the optimizers up since the call before.
        skipped: why nothing was captured; "" if it was.
        due: the tiers the captured state goes to: what was asked for, or nothing.
    """

    call_ms: float
    guard_ms: float
    skipped: str
    due: Due

    @property
    def blocked_ms(self) -> float:
        """What the training has lost to it since the call before."""
        return self.call_ms + self.guard_ms


class Snapshots:
    """The captures of one rank.

    Args:
        registry: the state; its structure must be part of `structure`.
        structure: what all ranks registered (`merge_structures`).
        job: the job's name.

    The plan is made at once, and nothing else: memory is the pool's, and comes with `open`.
    """

    def __init__(self, registry: Registry, structure: Structure, job: str) -> None:
        raise NotImplementedError

    @property
    def header(self) -> bytes:
        """The unsealed header for step 0, for `Enter.header`; b"" if this rank owns nothing."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """Size of this rank's image; 0 if it owns nothing. For `Enter.image_bytes_max`."""
        raise NotImplementedError

    def open(self, entered: Entered, generation: int, slot_count: int, base_step: int = 0) -> None:
        """Take the slots that the keeper gave, and put the update guard on the optimizers.

        Args:
            entered: the keeper's answer.
            generation: under which states are named.
            slot_count: the least number of slots that any rank got which got any: the same on all
                ranks, for they skip alike.
            base_step: of the state that the generation begins from.
        """
        raise NotImplementedError

    def level(self) -> Level:
        """How far this rank's images are; all ranks take the least (`min` of each entry)."""
        raise NotImplementedError

    def capture(self, state: State, due: Due, agreed: Level) -> Captured:
        """Capture the state of this moment. All ranks call it for the same steps, in order.

        Returns at once: what no optimizer updates has been copied then; the rest is copied while
        training goes on, and the next step of a registered optimizer waits until it is. A failure
        is told (`take_problems`), and ends nothing.

        Args:
            state: its name; of the generation of `open`, with a step above the last.
            due: the tiers that it goes to beyond memory and peers.
            agreed: the least `level` of all ranks at some earlier moment: the same on all ranks.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the copy that is going on has ended, well or badly."""
        raise NotImplementedError

    def take_problems(self) -> list[tuple[State, str]]:
        """What failed since the last call, and why: captures that do not exist on this rank."""
        raise NotImplementedError

    def take_choice(self) -> str:
        """Once: whether copies overlap with training or not, with the numbers; else ""."""
        raise NotImplementedError

    @property
    def committed(self) -> int:
        """The newest committed step that the keeper knows of; -1: none."""
        raise NotImplementedError

    @property
    def failures(self) -> int:
        """How many times a tier has failed; the keeper's events have the reasons."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for the copy that is going on, take off the guard, and let go of the pool."""
        raise NotImplementedError

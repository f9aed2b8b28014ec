"""How far all ranks are, without waiting: 8 bytes, sent at one capture and read at the next.

One asynchronous all-reduce (MIN) of two words of 32 bits, for loops that have no reduction of
their own on which the numbers could ride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.slots import LEVEL_ALL, STEP_NONE, Level
from keepstep.ckpt.tiers import Due

WORD_MAX = 2**31 - 1
_REPLAN = -(2**31)
_STEPS_MAX = 2**28
_FLAG_BITS = 2


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank says; or, put together, all.

    Attributes:
        level: how far it is.
        overdue: the tiers whose time has come, by the clock of one rank.
        wants_plan: a rank has found tensors that are not in the plan.
    """

    level: Level
    overdue: Due = Due.NOWHERE
    wants_plan: bool = False


def encode(said: Said, lost_told: int, base_step: int) -> tuple[int, int]:
    """The two words. Of each the smallest over all ranks is what counts.

    The first: steps since the base that are acknowledged; below zero, a step that was lost since
    `lost_told`, which passes before; or the wish for a new plan, which passes before all. The
    second: steps since the base that are drained, and the overdue tiers.

    Raises CheckpointError after 2**28 steps of one generation.
    """
    level = said.level
    first = _since(level.acked, base_step)
    if said.wants_plan:
        first = _REPLAN
    elif level.lost > lost_told:
        first = -_since(level.lost, base_step)
    second = _since(level.drained, base_step)
    if second != WORD_MAX:
        second = second << _FLAG_BITS | int(said.overdue)
    return first, second


def decode(words: tuple[int, int], before: Level, base_step: int) -> Said:
    """What all ranks know after `words`, when they knew `before`."""
    first, second = words
    acked, lost = before.acked, before.lost
    if first == WORD_MAX:
        acked = LEVEL_ALL
    elif first > 0:
        acked = max(acked, base_step + first)
    elif _REPLAN < first < 0:
        lost = max(lost, base_step - first)
    drained, overdue = before.drained, Due.NOWHERE
    if second == WORD_MAX:
        drained = LEVEL_ALL
    else:
        steps = second >> _FLAG_BITS
        drained = max(drained, base_step + steps) if steps else drained
        overdue = Due(second & (1 << _FLAG_BITS) - 1)
    return Said(Level(acked, drained, lost), overdue, wants_plan=first == _REPLAN)


def _since(step: int, base_step: int) -> int:
    if step == STEP_NONE:
        return 0
    if step == LEVEL_ALL:
        return WORD_MAX
    since = step - base_step
    if since > _STEPS_MAX:
        raise CheckpointError(
            f"step {step} is {since} steps after the generation's base: begin anew before "
            f"{_STEPS_MAX} of them"
        )
    return since


class LevelExchange:
    """The exchange of one rank.

    Args:
        group: moves CPU tensors, and is used for nothing else; None: this process is alone.
        base_step: that the generation began from: the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, base_step: int) -> None:
        self._group = group
        self._base_step = base_step
        self._lost_told = STEP_NONE
        self._words = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._is_begun = False
        self.known = Said(Level())
        """What all ranks know: the same on all, between the same calls."""

    def start(self, said: Said) -> None:
        """Send what this rank says. Returns at once; all ranks call it in the same order."""
        self.take()
        first, second = encode(said, self._lost_told, self._base_step)
        if first < 0 and not said.wants_plan:
            self._lost_told = said.level.lost
        self._words[0], self._words[1] = first, second
        self._is_begun = True
        if self._group is not None:
            self._work = dist.all_reduce(
                self._words, dist.ReduceOp.MIN, group=self._group, async_op=True
            )

    def take(self) -> Said:
        """What all ranks said last. Waits for the slowest one's last `start`, not for this one's.

        Raises RuntimeError, as torch gives it, if a rank is gone.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._is_begun:
            self._is_begun = False
            first, second = self._words.tolist()
            self.known = decode((first, second), self.known.level, self._base_step)
        return self.known

"""Which slot the next capture goes to: one rule, by which all ranks decide alike. Pure.

A slot is reused only when *all* ranks have a newer state, sealed by their keepers and acknowledged
by their peers. What all ranks have is known to all alike: the minimum of their levels rides on the
step's reduction. So all ranks capture, or skip, the same states, and once a state is there on all
ranks, one always is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepstep.ckpt.tiers import Due

STEP_NONE = -1
LEVEL_ALL = 2**31 - 1
"""What a rank that owns nothing says: it never holds the others up."""


class Level(msgspec.Struct, frozen=True):
    """How far one rank is; or, the smallest of each number, all ranks.

    The numbers of one rank never go back within a generation.

    Attributes:
        acked: newest step of the generation sealed here and acknowledged by the peers, in order.
        drained: newest due step that needs its slot no more.
        lost: newest step whose copy failed here. The one number of which all ranks need the
            *largest*: it travels as its negative. A rank says it no later than a larger `acked`;
            and a rank that lost a due step counts it as drained.
    """

    acked: int = STEP_NONE
    drained: int = STEP_NONE
    lost: int = STEP_NONE


OWNS_NOTHING = Level(LEVEL_ALL, LEVEL_ALL, STEP_NONE)


def agree(levels: Iterable[Level]) -> Level:
    """What all ranks know together. Raises ValueError for no levels."""
    everyone = tuple(levels)
    return Level(
        min(level.acked for level in everyone),
        min(level.drained for level in everyone),
        max(level.lost for level in everyone),
    )


class Decision(msgspec.Struct, frozen=True):
    """What to do with one state.

    Attributes:
        position: of the slot among the rank's (0 to n - 1); None: skip the capture.
        due: the tiers that this state goes to: also those that an earlier state was due at, and
            could not go to.
        put_off: the tiers that it does not go to now: the next captured state may.
        reason: why the capture is skipped, or something is put off; "" if neither.
    """

    position: int | None
    due: Due
    put_off: Due
    reason: str

    @property
    def is_skipped(self) -> bool:
        return self.position is None


class SlotRule:
    """The slots of one rank through one generation, as all ranks know them.

    At most one due state is pending: the others' slots stay free for the capture of every step,
    however slow the tiers are. A mark that comes meanwhile is put off to the next state that can
    take it. `due` must therefore be the same on all ranks.

    The slot of a step that some rank lost is used again at once. Another rank's keeper may not have
    sealed it yet there: then `SlotRow.claim` refuses, and that rank has lost the new step.

    Attributes:
        captured: the step that each slot holds; -1: none of this generation's.
        pending: the due step that still needs its slot; -1: none.
        owed: the tiers that were put off.
    """

    def __init__(self, slots: int, first_alone: bool) -> None:
        """`slots`: the number that every rank has. `first_alone`: only the first may be used until
        the first captured step is acknowledged everywhere: the others may hold what the
        generation began from.

        Raises ValueError for fewer than two slots.
        """
        if slots < 2:
            raise ValueError(f"{slots} slots: one holds the newest state, so at least 2 are needed")
        self.captured = [STEP_NONE] * slots
        self.pending = STEP_NONE
        self.owed = Due.NOWHERE
        self._is_first_alone = first_alone
        self._newest = STEP_NONE
        self._lost: set[int] = set()

    def decide(self, step: int, due: Due, agreed: Level) -> Decision:
        """What all ranks do with the state after `step`. A skipped one may be asked about again.

        Args:
            step: larger than all captured before.
            due: the tiers that it is due at.
            agreed: `agree` of levels that all ranks know to be the same.

        Raises ValueError for a step that was captured already, or comes before one.
        """
        if step <= self._newest:
            raise ValueError(f"step {step} does not come after step {self._newest}, captured last")
        wanted = due | self.owed
        self._settle(agreed)
        position = self._position(agreed)
        if position is None:
            self.owed = wanted
            return Decision(None, Due.NOWHERE, wanted, self._why_none(agreed))
        self.captured[position] = step
        self._newest = step
        if wanted and self.pending != STEP_NONE:
            self.owed = wanted
            reason = f"due step {self.pending} is not drained on all ranks yet"
            return Decision(position, Due.NOWHERE, wanted, reason)
        self.owed = Due.NOWHERE
        if wanted:
            self.pending = step
        return Decision(position, wanted, Due.NOWHERE, "")

    def _settle(self, agreed: Level) -> None:
        """Take in what all ranks know."""
        if self.pending <= agreed.drained:
            self.pending = STEP_NONE
        self._lost &= set(self.captured)
        if agreed.lost in self.captured:
            self._lost.add(agreed.lost)
        for position, step in enumerate(self.captured):
            # A due step that one rank lost may still be on its way from the others' slots.
            if step in self._lost and step != self.pending:
                self.captured[position] = STEP_NONE
        if self._is_first_alone and self.captured[0] != STEP_NONE:
            self._is_first_alone = not self._is_safe_since(self.captured[0], agreed)

    def _position(self, agreed: Level) -> int | None:
        """The slot to write to: an empty one, else the oldest that may go."""
        usable = self.captured[:1] if self._is_first_alone else self.captured
        for position, step in enumerate(usable):
            if step == STEP_NONE:
                return position
        old = [step for step in usable if self._may_go(step, agreed)]
        return usable.index(min(old)) if old else None

    def _may_go(self, step: int, agreed: Level) -> bool:
        """Whether all ranks have a newer one, and no tier needs this one."""
        if step == self.pending:
            return False
        return any(self._is_safe_since(newer, agreed) for newer in self.captured if newer > step)

    def _is_safe_since(self, step: int, agreed: Level) -> bool:
        """Whether all ranks are known to have `step`: a rank that lost it would have said so."""
        return agreed.lost < step <= agreed.acked

    def _why_none(self, agreed: Level) -> str:
        kept = ", ".join(str(step) for step in self.captured if step != STEP_NONE)
        alone = " (one slot until the generation's first state is safe)"
        return (
            f"no free slot{alone if self._is_first_alone else ''}: holding steps {kept}; "
            f"acknowledged on all ranks {agreed.acked}, drained {agreed.drained}"
        )

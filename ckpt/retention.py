"""Which live commits may go. Pure, and cannot choose the last good one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keepstep.ckpt.manifest import State


@dataclass(frozen=True, slots=True)
class Policy:
    """How many checkpoints to keep.

    Attributes:
        keep_last: the newest so many live commits stay. 0 keeps every commit, live or not.
        keep_every: besides, for each multiple of so many steps, the first live commit at or after
            it stays for good. 0: none besides.
    """

    keep_last: int = 5
    keep_every: int = 0

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")


def to_retire(
    live: Sequence[State], policy: Policy, protect: Collection[State] = ()
) -> tuple[State, ...]:
    """The live commits that `policy` lets go, oldest first.

    `live` is in any order. The newest is never among them, nor is any of `protect`.
    """
    if policy.keep_last == 0:
        return ()
    ascending = sorted(live, key=lambda state: state.step)
    kept = set(protect) | set(ascending[-policy.keep_last :])
    kept |= _milestones(ascending, policy.keep_every)
    return tuple(state for state in ascending if state not in kept)


def _milestones(ascending: Sequence[State], keep_every: int) -> set[State]:
    """For each multiple of `keep_every` (not 0), the first state at or after it."""
    if keep_every == 0:
        return set()
    found: set[State] = set()
    multiple_before = 0
    for state in ascending:
        multiple = state.step // keep_every
        if multiple > multiple_before:
            found.add(state)
            multiple_before = multiple
    return found

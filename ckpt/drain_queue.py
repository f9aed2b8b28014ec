"""Which image goes to a tier next, and which never will. Pure.

States may come faster than a tier takes them; then some are let go, but never one of which any
image was begun. A host that is alone begins with the newest. But a checkpoint needs the images of
all hosts, and if each began with its newest, hosts of different speeds would hardly ever finish the
same state. So where there are several, each begins with the *roundest* step: the one that the
highest power of two divides. Hosts that wait for different stretches of the same steps nearly
always agree on that, without a word: in a model of 2 to 6 hosts, 99 % (median; at least 71 %) of
as many states are finished by all as the slowest can finish, against 4 % with the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from keepstep.ckpt.manifest import State

REMEMBERED = 16
"""Begun states that are remembered, so that a late image of one is not taken for a new state."""


class Ticket(NamedTuple):
    """The image of `rank` in `state`, on its way to a tier."""

    state: State
    rank: int


class DrainQueue:
    """What waits for one tier on one host. One state is under way at a time.

    Args:
        waiting_max: states that wait at most; when another comes, the least wanted goes, but never
            the newest.
    """

    def __init__(self, waiting_max: int = 4) -> None:
        self.is_alone = True
        """Whether no other host has a part in the same states."""
        self._waiting_max = waiting_max
        self._waiting: dict[State, set[int]] = {}
        self._running: set[Ticket] = set()
        self._finished: Counter[State] = Counter()

    def add(self, ticket: Ticket) -> list[Ticket]:
        """One more image. Returns what goes to make room for it."""
        self._waiting.setdefault(ticket.state, set()).add(ticket.rank)
        dropped = []
        fresh = self.choices()
        if len(fresh) > self._waiting_max:
            dropped = self._drop(min(fresh[:-1], key=self._rank))
        return dropped

    def choices(self) -> list[State]:
        """The states that wait and of which nothing was begun, oldest first."""
        return sorted(state for state in self._waiting if not self._is_begun(state))

    def has_next(self) -> bool:
        """Whether `take` would return an image."""
        return any(not self._running or self._is_begun(state) for state in self._waiting)

    def take(self) -> tuple[Ticket | None, list[Ticket]]:
        """The image to begin now, if any, and what is given up for it.

        Images of states that were begun come first, oldest first. If there is none, and none is
        running, the most wanted state is begun; the states before it will never be.
        """
        begun = sorted(state for state in self._waiting if self._is_begun(state))
        if begun:
            return self._start(begun[0]), []
        if self._running or not self._waiting:
            return None, []
        fresh = sorted(self._waiting)
        chosen = max(fresh, key=self._rank)
        dropped = [ticket for state in fresh if state < chosen for ticket in self._drop(state)]
        return self._start(chosen), dropped

    def finish(self, ticket: Ticket) -> None:
        """The image is where it was to go, or will never be."""
        self._running.discard(ticket)
        self._finished[ticket.state] += 1
        while len(self._finished) > REMEMBERED:
            del self._finished[min(self._finished)]

    def again(self, ticket: Ticket) -> None:
        """The image's try failed: it waits again."""
        self._running.discard(ticket)
        self._waiting.setdefault(ticket.state, set()).add(ticket.rank)

    def drop(self, is_dropped: Callable[[State], bool]) -> list[Ticket]:
        """Let go of all that waits and of which `is_dropped`; what is running goes on."""
        states = sorted(state for state in self._waiting if is_dropped(state))
        return [ticket for state in states for ticket in self._drop(state)]

    def tickets(self) -> list[Ticket]:
        """All that waits or is running, by state and rank."""
        waiting = [Ticket(state, rank) for state, ranks in self._waiting.items() for rank in ranks]
        return sorted({*waiting, *self._running})

    def _rank(self, state: State) -> tuple[int, int, int]:
        """The higher, the more wanted."""
        return state.generation, 0 if self.is_alone else _roundness(state.step), state.step

    def _is_begun(self, state: State) -> bool:
        return state in self._finished or any(each.state == state for each in self._running)

    def _start(self, state: State) -> Ticket:
        ranks = self._waiting[state]
        ticket = Ticket(state, min(ranks))
        ranks.remove(ticket.rank)
        if not ranks:
            del self._waiting[state]
        self._running.add(ticket)
        return ticket

    def _drop(self, state: State) -> list[Ticket]:
        return [Ticket(state, rank) for rank in sorted(self._waiting.pop(state))]


def _roundness(step: int) -> int:
    """The highest power of two that divides `step`; of 0, more than any."""
    return step & -step or 1 << 64


class SlotNeeds:
    """Which due steps of one rank still need their slots, and up to which step none does."""

    def __init__(self) -> None:
        self._needed: set[int] = set()
        self._released: set[int] = set()
        self.level = -1
        """Up to this step no due image needs its slot; -1: nothing is known yet."""

    def need(self, step: int) -> None:
        """The due image of `step` is in its slot alone."""
        self._needed.add(step)
        self._released.discard(step)

    def release(self, step: int) -> bool:
        """It needs its slot no more. Returns whether `level` has risen."""
        self._needed.discard(step)
        self._released.add(step)
        least = min(self._needed, default=None)
        free = [each for each in self._released if least is None or each < least]
        before = self.level
        self.level = max([before, *free])
        self._released.difference_update(free)
        return self.level > before

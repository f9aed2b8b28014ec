"""The way to one tier: a queue, a few threads, and the pauses after failures.

What failed is tried again for ever; a pause holds for the whole lane, since it is the tier that
failed, and not the image. Threads are daemons: a store that never answers cannot keep a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from keepstep.ckpt.drain_queue import DrainQueue, Ticket
from keepstep.ckpt.manifest import State
from keepstep.storage.errors import StoreError, Throttled

PAUSE_FIRST_S = 0.1
_THROTTLED_FIRST_S = 1.0
_EXPONENT_MAX = 16


@dataclass(frozen=True, slots=True)
class Failure:
    """One more failure of a tier.

    Attributes:
        ticket: the image that was tried.
        error: what the tier said.
        tries: failures in a row, with any image.
        failing_s: for how long it has failed, in seconds.
        waiting: all images that wait for this tier, that of `ticket` too.
    """

    ticket: Ticket
    error: StoreError
    tries: int
    failing_s: float
    waiting: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """An image has been under way for long, without an error.

    Attributes:
        ticket: the image.
        under_way_s: since its try began, in seconds.
        times: the how many-th time this is told of the try.
        waiting: the images that wait for this tier meanwhile.
    """

    ticket: Ticket
    under_way_s: float
    times: int
    waiting: tuple[Ticket, ...]


OnLate = Callable[[Late], Collection[Ticket]]
"""Returns the images that nobody waits for in this lane any more: `Lane.drain` does not either."""


class LaneWork(Protocol):
    """What a lane's owner does. Called from the lane's threads, never with its lock held."""

    def run(self, ticket: Ticket) -> bool:
        """Bring the image to the tier, or settle that it will never be there.

        Returns whether the tier did what it was asked. Raises StoreError to be called again after a
        pause.
        """

    def dropped(self, ticket: Ticket) -> None:
        """It will never be: a newer state took its place."""

    def failed(self, failure: Failure) -> None:
        """A try failed."""

    def recovered(self, tries: int, failing_s: float) -> None:
        """The lane works again, after so many failures."""


class Lane:
    """Runs until `close`. All methods return at once, unless they say otherwise.

    Args:
        name: of the threads.
        workers: threads; images that are under way at once.
        work: what they do.
        pause_max_s: the longest pause after failures.
        late_s: each time that a try has gone on for so long, `on_late` is called.
        on_late: called from a thread of the lane; None: nobody looks.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        work: LaneWork,
        pause_max_s: float,
        *,
        late_s: float = 0.0,
        on_late: OnLate | None = None,
    ) -> None:
        self._work = work
        self._pause_max_s = pause_max_s
        self._queue = DrainQueue()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._begun = threading.Condition(lock)
        self._late_s = late_s
        self._under_way: dict[Ticket, tuple[float, int, threading.Thread]] = {}
        self._passed: set[Ticket] = set()
        self._is_stopped = False
        self._tries = 0
        self._failing_since_s = 0.0
        self._not_before_s = 0.0
        self._threads = [
            threading.Thread(target=self._serve, name=f"keepstep-{name}-{number}", daemon=True)
            for number in range(workers)
        ]
        if on_late is not None:
            watcher = threading.Thread(
                target=self._watch, args=(on_late,), name=f"keepstep-{name}-watch", daemon=True
            )
            self._threads.append(watcher)
        for thread in self._threads:
            thread.start()

    def enter(self, is_alone: bool) -> None:
        """A generation begins: whether no other host has a part in its states."""
        with self._changed:
            self._queue.is_alone = is_alone

    def add(self, ticket: Ticket) -> None:
        """One more image to bring there."""
        with self._changed:
            dropped = self._queue.add(ticket)
            self._passed.difference_update(dropped)
            self._changed.notify_all()
        for each in dropped:
            self._work.dropped(each)

    def drop(self, is_dropped: Callable[[State], bool]) -> None:
        """Let go of what waits and of which `is_dropped`."""
        with self._changed:
            dropped = self._queue.drop(is_dropped)
            self._passed.difference_update(dropped)
            self._changed.notify_all()
        for each in dropped:
            self._work.dropped(each)

    def tickets(self) -> list[Ticket]:
        """All that waits or is under way."""
        with self._changed:
            return self._queue.tickets()

    def status(self) -> dict[str, object]:
        """JSON: the steps that wait or are under way, and for how long every try has failed."""
        with self._changed:
            return {
                "waiting_steps": sorted({each.state.step for each in self._queue.tickets()}),
                "tries_failed": self._tries,
                "failing_s": time.monotonic() - self._failing_since_s if self._tries else 0.0,
            }

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing waits or is under way, at most until `deadline_s` (monotonic).

        But not for what `on_late` said that nobody waits for.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._passed.issuperset(self._queue.tickets()),
                max(0.0, deadline_s - time.monotonic()),
            )

    def close(self, deadline_s: float) -> None:
        """Begin nothing more, and wait for the threads, at most until `deadline_s` (monotonic).

        Not for one that is late.
        """
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            self._begun.notify_all()
            late = [thread for _, times, thread in self._under_way.values() if times]
        for thread in self._threads:
            if thread not in late:
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                is_working = self._work.run(ticket)
            except StoreError as error:
                self._pause(ticket, error)
            else:
                self._finish(ticket, is_working)

    def _next(self) -> Ticket | None:
        """Wait for the next image to begin; None when the lane is closed."""
        while True:
            with self._changed:
                if not self._wait_for_something():
                    return None
                ticket, dropped = self._queue.take()
                self._passed.difference_update(dropped)
                if ticket is not None:
                    self._under_way[ticket] = time.monotonic(), 0, threading.current_thread()
                    self._begun.notify_all()
            for each in dropped:
                self._work.dropped(each)
            if ticket is not None:
                return ticket

    def _wait_for_something(self) -> bool:
        """Wait until there is something to begin; False when the lane is closed."""
        while not self._is_stopped:
            pause_s = self._not_before_s - time.monotonic()
            if pause_s > 0:
                self._changed.wait(pause_s)
            elif self._queue.has_next():
                return True
            else:
                self._changed.wait()
        return False

    def _watch(self, on_late: OnLate) -> None:
        while (late := self._next_late()) is not None:
            passed = on_late(late)
            with self._changed:
                self._passed.update(passed)
                self._passed.intersection_update(self._queue.tickets())
                self._changed.notify_all()

    def _next_late(self) -> Late | None:
        """Wait for the next try that goes on for long; None when the lane is closed."""
        with self._begun:
            while not self._is_stopped:
                now_s = time.monotonic()
                due_s = {
                    ticket: began_s + (times + 1) * self._late_s
                    for ticket, (began_s, times, _) in self._under_way.items()
                }
                first = min(due_s, key=lambda ticket: due_s[ticket], default=None)
                if first is None:
                    self._begun.wait()
                elif due_s[first] > now_s:
                    self._begun.wait(due_s[first] - now_s)
                else:
                    began_s, times, thread = self._under_way[first]
                    self._under_way[first] = began_s, times + 1, thread
                    tickets = self._queue.tickets()
                    waiting = tuple(each for each in tickets if each not in self._under_way)
                    return Late(first, now_s - began_s, times + 1, waiting)
        return None

    def _finish(self, ticket: Ticket, is_working: bool) -> None:
        with self._changed:
            self._queue.finish(ticket)
            del self._under_way[ticket]
            self._passed.discard(ticket)
            tries, failing_s = self._tries, time.monotonic() - self._failing_since_s
            if is_working:
                self._tries = 0
                self._not_before_s = 0.0
            self._changed.notify_all()
        if tries and is_working:
            self._work.recovered(tries, failing_s)

    def _pause(self, ticket: Ticket, error: StoreError) -> None:
        now_s = time.monotonic()
        with self._changed:
            self._queue.again(ticket)
            del self._under_way[ticket]
            if not self._tries:
                self._failing_since_s = now_s
            self._tries += 1
            first_s = _THROTTLED_FIRST_S if isinstance(error, Throttled) else PAUSE_FIRST_S
            pause_s = first_s * 2.0 ** min(self._tries - 1, _EXPONENT_MAX)
            self._not_before_s = now_s + min(pause_s, self._pause_max_s)
            failing_s = now_s - self._failing_since_s
            waiting = tuple(self._queue.tickets())
            failure = Failure(ticket, error, self._tries, failing_s, waiting)
            self._changed.notify_all()
        self._work.failed(failure)

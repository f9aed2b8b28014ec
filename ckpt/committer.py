"""Commits: who makes them, from done records alone, and how all other keepers hear of them.

One keeper of a generation commits. It knows its own host's done records without asking, and finds
those of others in the store. A state whose images together have all bytes of all tensors is
complete; its manifest is the description, which every host has, with the records. The keepers of
the other hosts follow the log. No rank and no keeper ever waits for another here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.ckpt.commit_course import Course
from keepstep.ckpt.errors import CheckpointError, FormatError, NotCommitted, Superseded
from keepstep.ckpt.manifest import DoneRecord, State
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.storage.errors import StoreError
from keepstep.storage.store import Store

POLL_FIRST_S = 0.05
_POLL_GROWTH = 1.5
_WATCHED_MAX = 16


@dataclass(slots=True)
class Watched:
    """A state that may become a checkpoint.

    Attributes:
        shelved: one of its images, for the description.
        since_s: when it was first seen, monotonic.
        records: the own host's done records, by rank.
    """

    shelved: Shelved
    since_s: float
    records: dict[int, DoneRecord] = field(default_factory=dict)


class Committer:
    """One thread, which sleeps unless a state is watched. Methods return at once, or say so.

    Args:
        open_store: gives the store, or raises StoreError; called again until it does.
        job: whose log it is.
        reporter: told of commits, failures, and of the end of the term.
        poll_max_s: the longest pause between two looks at the store.
    """

    def __init__(
        self, open_store: Callable[[], Store], job: str, reporter: Reporter, poll_max_s: float
    ) -> None:
        self._open_store = open_store
        self._job = job
        self._reporter = reporter
        self._poll_max_s = poll_max_s
        self._changed = threading.Condition()
        self._tenure: Tenure | None = None
        self._watched: dict[State, Watched] = {}
        self._stopped = threading.Event()
        self._is_fresh = False
        self._committed: State | None = None
        self._tries = 0
        self._failing_since_s = 0.0
        self._course: Course | None = None
        self._over: Tenure | None = None
        self._wants_collecting = False
        self._thread = threading.Thread(target=self._serve, name="keepstep-commit", daemon=True)
        self._thread.start()

    def enter(self, tenure: Tenure) -> None:
        """From now on, states of this generation, under its term."""
        with self._changed:
            if self._tenure is None or self._tenure.generation != tenure.generation:
                self._committed = None
                self._watched = {}
            self._tenure = tenure
            self._is_fresh = True
            self._changed.notify_all()

    def expect(self, shelved: Shelved) -> None:
        """An own image that is on its way to the store: its state may become a checkpoint."""
        state = shelved.state
        with self._changed:
            if self._is_too_late(state) or state in self._watched:
                return
            self._watched[state] = Watched(shelved, time.monotonic())
            while len(self._watched) > _WATCHED_MAX:
                del self._watched[min(self._watched)]
            self._is_fresh = True
            self._changed.notify_all()

    def done(self, state: State, record: DoneRecord) -> None:
        """An own image is durable in the store, and its done record too."""
        with self._changed:
            watched = self._watched.get(state)
            if watched is not None:
                watched.records[record.rank] = record
                self._is_fresh = True
                self._changed.notify_all()

    def forget(self, state: State) -> None:
        """An own image of `state` will never be in the store."""
        with self._changed:
            self._watched.pop(state, None)
            self._changed.notify_all()

    def drain(self, deadline_s: float) -> bool:
        """Wait until no state is watched, at most until `deadline_s` (monotonic). Blocking."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._watched, max(0.0, deadline_s - time.monotonic())
            )

    def close(self, deadline_s: float) -> None:
        """Stop, and wait for the thread, at most until `deadline_s` (monotonic). Blocking."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def status(self) -> dict[str, object]:
        """JSON: the newest commit of this generation, and the states that wait for theirs."""
        now_s = time.monotonic()
        with self._changed:
            oldest = min(self._watched, default=None)
            return {
                "is_committer": self._tenure is not None and self._tenure.is_committer,
                "is_superseded": self._over is not None and self._over == self._tenure,
                "committed_step": -1 if self._committed is None else self._committed.step,
                "waiting_steps": [state.step for state in sorted(self._watched)],
                "lag_s": 0.0 if oldest is None else now_s - self._watched[oldest].since_s,
                "failing_s": now_s - self._failing_since_s if self._tries else 0.0,
            }

    def _is_too_late(self, state: State) -> bool:
        """Whether `state` will never be committed, by what is known here."""
        if self._tenure is None or state.generation != self._tenure.generation:
            return True
        if self._over == self._tenure:
            return True
        return self._committed is not None and state.step <= self._committed.step

    # The thread.

    def _serve(self) -> None:
        pause_s: float | None = None
        while (tenure := self._wait(pause_s)) is not None:
            with self._changed:
                is_fresh, self._is_fresh = self._is_fresh, False
            try:
                self._look(tenure)
            except Superseded as error:
                self._end(tenure, error)
            except (StoreError, CheckpointError) as error:
                self._fail(error)
            else:
                self._recover()
            pause_s = self._next_pause(pause_s, is_fresh)

    def _wait(self, pause_s: float | None) -> Tenure | None:
        """Until something is new, or the pause is over. None when stopped."""
        with self._changed:
            if self._tries:
                # What is new does not mend a store that fails.
                self._changed.wait_for(self._stopped.is_set, pause_s)
            else:
                self._changed.wait_for(lambda: self._stopped.is_set() or self._is_fresh, pause_s)
            return None if self._stopped.is_set() else self._tenure

    def _next_pause(self, pause_s: float | None, is_fresh: bool) -> float | None:
        """How long to sleep unless something new comes; None: until then."""
        with self._changed:
            if not self._watched and not self._tries:
                return None
            if pause_s is None or (is_fresh and not self._tries):
                return POLL_FIRST_S
            return min(pause_s * _POLL_GROWTH, self._poll_max_s)

    def _look(self, tenure: Tenure) -> None:
        """Commit what is complete, or hear what was committed; then tidy up."""
        if self._over == tenure:
            return
        course = self._course
        if course is None or course.tenure != tenure:
            self._course = None
            course = Course(self._open_store(), tenure, self._job, self._stopped.wait)
            self._wants_collecting = tenure.is_committer
            course.read()
            self._hear(course)
            self._course = course
        with self._changed:
            watched = sorted(self._watched.items())
        if not tenure.is_committer:
            if watched:
                course.read()
                self._hear(course)
            return
        for state, each in watched:
            self._try(course, state, each)
        if self._wants_collecting:
            self._wants_collecting = False
            self._collect(course)

    def _try(self, course: Course, state: State, watched: Watched) -> None:
        with self._changed:
            known = dict(watched.records)
        records = course.gather(state, known)
        if not course.is_complete(records):
            return
        try:
            course.commit(watched.shelved.description(), records)
        except (NotCommitted, FormatError) as error:
            # It may be in the log already: an earlier answer was lost, or an earlier keeper died.
            if not self._hear(course, state):
                self.forget(state)
                self._tell_failure(f"step {state.step} will not be committed: {error}", state)
        else:
            self._hear(course, state)
            self._wants_collecting = True

    def _hear(self, course: Course, state: State | None = None) -> bool:
        """Take note of the newest commit that the log is known to have: is it that of `state`?"""
        newest = course.newest()
        floor = course.committed_to()
        with self._changed:
            if self._tenure != course.tenure:
                return False
            watched = None if newest is None else self._watched.get(newest.state)
            for settled in [each for each in self._watched if each.step <= floor]:
                del self._watched[settled]
            is_news = newest is not None and newest.state != self._committed
            if newest is not None:
                self._committed = newest.state
            self._changed.notify_all()
        if newest is None:
            return False
        if is_news:
            self._reporter.committed(newest.state)
        if is_news and watched is not None and course.tenure.is_committer:
            took_s = time.monotonic() - watched.since_s
            self._reporter.event(
                "checkpoint_committed",
                f"step {newest.state.step} is durable in {course.store.url} (entry {newest.seq}), "
                f"{took_s:.2f} s after its first image was sealed",
                step=newest.state.step,
                generation=newest.state.generation,
                size_bytes=newest.size_bytes,
                took_s=took_s,
            )
        return newest.state == state

    def _collect(self, course: Course) -> None:
        """Retention: what it cannot do now, it does after the next commit."""
        try:
            report = course.collect()
        except Superseded:
            raise
        except (StoreError, CheckpointError) as error:
            self._reporter.event("retention_failed", str(error))
            return
        if report.retired:
            self._reporter.event(
                "retired",
                f"retention: {course.tenure.tiers.store}",
                steps=[state.step for state in report.retired],
                states=[[state.generation, state.step] for state in report.retired],
            )

    def _end(self, tenure: Tenure, error: Superseded) -> None:
        """A newer run has taken over: commit nothing more under this tenure."""
        with self._changed:
            self._over = tenure
            self._watched = {}
            self._tries = 0
            self._changed.notify_all()
        self._reporter.superseded(tenure.generation)
        self._reporter.event(
            "superseded",
            str(error),
            generation=tenure.generation,
            term=tenure.term,
            by_term=error.term,
        )

    def _fail(self, error: StoreError | CheckpointError) -> None:
        now_s = time.monotonic()
        with self._changed:
            if not self._tries:
                self._failing_since_s = now_s
            self._tries += 1
            tries, failing_s = self._tries, now_s - self._failing_since_s
        if tries & (tries - 1) == 0:
            self._tell_failure(f"{error}; tried {tries} times in {failing_s:.0f} s", None)

    def _recover(self) -> None:
        with self._changed:
            tries, self._tries = self._tries, 0
            failing_s = time.monotonic() - self._failing_since_s
        if tries:
            reason = f"the log can be written again, after {tries} failures in {failing_s:.0f} s"
            self._reporter.event("commit_recovered", reason, tries=tries, failing_s=failing_s)

    def _tell_failure(self, reason: str, state: State | None) -> None:
        with self._changed:
            last = None if self._committed is None else self._committed.step
            step = state or max(self._watched, default=None)
        known = "this generation has no commit yet" if last is None else f"the last is step {last}"
        self._reporter.event(
            "checkpoint_failed",
            f"{reason}; {known}; training goes on",
            step=None if step is None else step.step,
            last_good_step=last,
        )

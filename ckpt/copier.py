"""Copying in the background: a thread, and whoever has to wait for it helps.

One copying goes on at a time. Updates may go on as soon as its jobs are done (on a device: are
launched, and the update's stream waits for them); only then it is settled and reported, so that a
waiting optimizer never waits for words.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from types import TracebackType

from keepstep.ckpt.copy_jobs import Job
from keepstep.ckpt.device_copies import SideStream


class Copying:
    """The jobs of one capture.

    Args:
        jobs: done in any order, by any thread.
        streams: of the devices that jobs launch copies on.
        ended: called once, in the copier's thread, when all is done or nothing goes on any more;
            with what went wrong first, or None.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        streams: Sequence[SideStream],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._left = deque(jobs)
        self._open = len(self._left)
        self._lock = threading.Lock()
        self._streams = streams
        self._ended = ended
        self._problem: Exception | None = None
        self._are_done = threading.Event()
        self._is_over = threading.Event()
        if not self._open:
            self._are_done.set()

    def hold_update(self) -> None:
        """Block until an in-place update may come next on this thread (and its stream)."""
        self._work()
        self._are_done.wait()
        for stream in self._streams:
            stream.hold_current()

    def wait(self) -> None:
        """Block until the copy is over and `ended` was called."""
        self._is_over.wait()

    @property
    def problem(self) -> Exception | None:
        """What went wrong first; also if it was `ended` that did."""
        return self._problem

    def run(self) -> None:
        """Do all that nobody else does, settle and report. In the copier's thread."""
        self._work()
        self._are_done.wait()
        with _Outcome(self):
            for stream in self._streams:
                stream.settle()
        try:
            with _Outcome(self):
                self._ended(self._problem)
        finally:
            self._is_over.set()

    def failed(self, error: Exception) -> None:
        """Remember the first error, and leave all jobs that nobody has begun."""
        with self._lock:
            self._problem = self._problem or error
        while self._take() is not None:
            self._done()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                with _Outcome(self):
                    job()
            finally:
                self._done()

    def _take(self) -> Job | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def _done(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._are_done.set()


class _Outcome:
    """Whatever error ends the block becomes the copying's, for a copy ends no training."""

    def __init__(self, copying: Copying) -> None:
        self._copying = copying

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return True
        if isinstance(error, Exception):
            self._copying.failed(error)
            return True
        self._copying.failed(RuntimeError(f"interrupted by {type(error).__name__}"))
        return False


class Copier:
    """The thread. In a process that is forked from this one, nothing is being copied."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Copying | None] = SimpleQueue()
        self._pid = os.getpid()
        self._current: Copying | None = None
        self._thread = threading.Thread(target=self._main, name="keepstep-copy", daemon=True)
        self._thread.start()

    def begin(self, copying: Copying) -> None:
        """Start a copying; the one before it must be over (`wait`). Returns at once."""
        self._current = copying
        self._queue.put(copying)

    def hold_update(self) -> None:
        """Block until the next in-place update may come; at once if nothing is being copied."""
        if self._current is not None and os.getpid() == self._pid:
            self._current.hold_update()

    def wait(self) -> None:
        """Block until nothing is being copied."""
        if self._current is not None and os.getpid() == self._pid:
            self._current.wait()

    def close(self) -> None:
        """End the thread, after the copying that is going on."""
        if os.getpid() == self._pid:
            self._queue.put(None)
            self._thread.join()
        self._current = None

    def _main(self) -> None:
        while (copying := self._queue.get()) is not None:
            copying.run()

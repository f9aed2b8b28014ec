"""File-system calls that differ from the real ones in one way, for a `FileStore` under test."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kit.powerloss import RecordingPosix

from keepstep.storage.posix import Posix

CALLS = [name for name in vars(Posix) if not name.startswith("_")]


class UnsyncedPosix(Posix):
    """Never fsyncs: for tests in which no power is lost, and which would be slow."""

    def fsync(self, fd: int) -> None:
        pass


class InterleavedPosix(RecordingPosix):
    """Lets several threads make their calls one at a time, in an order drawn with a seed.

    Each thread of `run` goes on until it asks for a call, and waits there until all others wait
    too; then one of them is drawn. So the same seed gives the same recording. Other threads' calls
    are made at once.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        super().__init__(root)
        self._random = random.Random(seed)
        self._turn = threading.Condition()
        self._waiting: dict[int, bool] = {}
        self._drawn: int | None = None
        self._me = threading.local()
        for call in CALLS:
            setattr(self, call, self._in_turn(getattr(self, call)))

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run each of `works` in a thread, interleaved. Raises what one of them raised."""
        self._waiting = dict.fromkeys(range(len(works)), False)

        def follow(number: int, work: Callable[[], None]) -> None:
            self._me.number = number
            try:
                work()
            finally:
                with self._turn:
                    del self._waiting[number]
                    self._draw()

        with ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(follow, n, work) for n, work in enumerate(works)]
            for future in futures:
                future.result()

    def _in_turn(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object) -> object:
            number = getattr(self._me, "number", None)
            if number is None or getattr(self._me, "inside", False):
                return call(*args)
            self._wait(number)
            self._me.inside = True
            try:
                return call(*args)
            finally:
                self._me.inside = False

        return wrapper

    def _wait(self, number: int) -> None:
        with self._turn:
            self._waiting[number] = True
            self._draw()
            while self._drawn != number:
                self._turn.wait()
            self._drawn = None
            self._waiting[number] = False

    def _draw(self) -> None:
        """Once all wait, draw one. That it is running again is noted when it wakes up."""
        if self._waiting and all(self._waiting.values()) and self._drawn is None:
            self._drawn = self._random.choice(sorted(self._waiting))
            self._turn.notify_all()


class ThreadedPosix(RecordingPosix):
    """Records the calls of many threads, one after the other, in the order that they come in."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        super().__init__(root)
        self._one = threading.RLock()
        for call in CALLS:
            setattr(self, call, self._alone(getattr(self, call)))

    def mark(self, label: str) -> None:
        with self._one:
            super().mark(label)

    def _alone(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object) -> object:
            with self._one:
                return call(*args)

        return wrapper

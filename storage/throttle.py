"""Sending less while a store asks for it, and more again when it does not.

All requests of one store share a gap between two of them. It is zero until the store says that
there are too many, doubles each time it says so again, and shrinks with each request that it takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GAP_FIRST_S = 0.02
GAP_MAX_S = 2.0
_SHRINK = 0.8


class Throttle:
    """The gap that all requests of one store share. Safe between threads.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gap_s = 0.0
        self._next_s = 0.0
        self._widened_s = float("-inf")

    @property
    def gap_s(self) -> float:
        """The present gap between two requests, in seconds."""
        return self._gap_s

    def take_turn(self) -> float:
        """How long the caller must wait before its request, in seconds; its turn is reserved."""
        with self._lock:
            now_s = self._clock()
            turn_s = max(now_s, self._next_s)
            self._next_s = turn_s + self._gap_s
            return turn_s - now_s

    def refused(self) -> None:
        """The store asked for fewer requests.

        The answers to requests that were under way together count once.
        """
        with self._lock:
            now_s = self._clock()
            if now_s - self._widened_s < max(self._gap_s, GAP_FIRST_S):
                return
            self._widened_s = now_s
            self._gap_s = min(max(self._gap_s * 2, GAP_FIRST_S), GAP_MAX_S)
            self._next_s = max(self._next_s, now_s + self._gap_s)

    def accepted(self) -> None:
        """The store took a request."""
        with self._lock:
            gap_s = self._gap_s * _SHRINK
            self._gap_s = gap_s if gap_s >= GAP_FIRST_S else 0.0

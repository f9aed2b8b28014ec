"""Something that is opened when it is first used, and again if that failed. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Calls `make` until it has returned once; gives what it returned from then on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []

    def __call__(self) -> T:
        """What `make` made. Blocks as it does, and raises what it raises."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

"""Asking a run to stop: SIGTERM and Ctrl-C finish the step and commit; a second one exits at once.

A rank only remembers the request: that all ranks stop after the same step is agreed in the step's
reduction. Under the launcher it is the launcher that counts to two, because Ctrl-C reaches it and
all ranks alike.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Remembers that this process was asked to stop."""

    def __init__(self, *, exit_on_second: bool) -> None:
        """Listen from now on.

        Args:
            exit_on_second: end the process on the second signal (128 + its number); false where
                a launcher does that.
        """
        self._exit_on_second = exit_on_second
        self._signal: int | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and self._exit_on_second:
            os._exit(128 + number)
        if self._signal is None:  # the first says who asked; what is passed on comes after it
            self._signal = number

    @property
    def is_requested(self) -> bool:
        """Whether a signal came."""
        return self._signal is not None

    @property
    def reason(self) -> str:
        """Which signal, in words; "" if none came."""
        return "" if self._signal is None else f"asked by {signal.Signals(self._signal).name}"


class StopNow(BaseException):
    """The second signal: everything is to end at once. `exit_code` is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"second {signal.Signals(number).name}: ended at once")
        self.exit_code = 128 + number


def forward_stop(first: Callable[[str], None]) -> None:
    """In a launcher: call `first` (with the signal's name) on the first signal, then StopNow."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise StopNow(number)
        first(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, note)


def ignore_stop() -> None:
    """In a launcher that is cleaning up: no signal interrupts that."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def allow_stop() -> None:
    """In a launcher whose ranks have ended: a signal ends it as it ends any program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

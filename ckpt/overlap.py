"""Whether copies overlap with the training or hold it up: by what steps cost either way. Pure.

Overlapped copies should be free, but where the memory's bandwidth or the cores are short they slow
every step down, at times by more than they take alone. So both ways are tried in turn at the
beginning, and the cheaper one stays.
"""

from __future__ import annotations

from statistics import median

WARM_UP = 3
BLOCK = 3
PAIRS = 4
"""Steps that are not counted, steps of one way at a stretch, and the turns of each way."""

GAIN = 0.98
"""Blocking must make steps cheaper than this times those with overlap, else overlap stays."""


class OverlapChoice:
    """Fed with the time from one capture to the next; says how the next one is to be done.

    Attributes:
        is_overlapped: whether the next copy goes on beside the training.
        is_settled: whether that will not change any more.
        words: what was chosen and why, once it is settled; "" before.
    """

    def __init__(self) -> None:
        self.is_overlapped = True
        self.is_settled = False
        self.words = ""
        self._count = 0
        self._ms: dict[bool, list[float]] = {True: [], False: []}

    def add(self, step_ms: float) -> None:
        """One step took `step_ms`, from one capture's beginning to the next one's.

        The earlier of the two captures was done as `is_overlapped` said.
        """
        if self.is_settled:
            return
        self._count += 1
        if self._count > WARM_UP:
            self._ms[self.is_overlapped].append(step_ms)
        measured = self._count - WARM_UP
        if measured >= 2 * BLOCK * PAIRS:
            self._settle()
        elif measured > 0:
            # Blocks in the order 1 0 0 1 1 0 0 1: a drift of the steps' time falls on both.
            block = measured // BLOCK
            self.is_overlapped = block % 4 in (0, 3)

    def _settle(self) -> None:
        overlapped_ms, blocked_ms = median(self._ms[True]), median(self._ms[False])
        self.is_overlapped = blocked_ms >= GAIN * overlapped_ms
        self.is_settled = True
        what = "overlap with the training" if self.is_overlapped else "hold the training up"
        self.words = (
            f"copies {what}: a step takes {overlapped_ms:.2f} ms with overlap and "
            f"{blocked_ms:.2f} ms with waiting (medians of {BLOCK * PAIRS})"
        )

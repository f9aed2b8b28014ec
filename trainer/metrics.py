"""`metrics.jsonl`: what each finished step was. Append-only; one object a step.

A step that is done again appears again: of the lines of a step, the one with the highest
generation counts, and the last of equals (`read_metrics`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.ckpt.jsonlines import JsonLines, read_lines

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One finished step.

    Attributes:
        step: from 1.
        loss: mean over the step's valid tokens, of all ranks.
        grad_norm: of the whole model, before clipping.
        lr: that the optimizer used in this step.
        tokens: valid ones, that is labels in the loss.
        samples: [first, end) global sample indices, counting on across epochs.
        applied: false if the update was not made.
        generation: that did the step.
        layout: sizes of dp, tp, pp and dp_replicate.
        comm_bytes: bytes that all ranks together sent, by axis: dp, tp, pp.
        comm_bytes_least: the least that this layout needs, by the same formulae.
        step_ms: wall time, without the capture.
        capture_ms: what training lost to this step's capture, and to the rest of the one before.
        captured: whether the state after the step was captured into memory.
        lag_steps: since the newest commit that was known then; all of them if there was none.
        lag_s: since that commit's state was captured, or since the run began.
        tokens_per_s: tokens by step time.
        flops_utilisation: of the device's peak; null where that is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: tuple[int, int]
    applied: bool
    generation: int
    layout: dict[str, int]
    comm_bytes: dict[str, int]
    comm_bytes_least: dict[str, int]
    step_ms: float
    capture_ms: float
    captured: bool
    lag_steps: int
    lag_s: float
    tokens_per_s: float
    flops_utilisation: float | None


class Metrics:
    """The metrics file of a run, open for appending."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = JsonLines(run_dir / FILE_NAME)
        self.repaired_bytes = self._lines.repair()

    def append(self, step: StepMetrics) -> None:
        """Add a finished step."""
        self._lines.append(dataclasses.asdict(step))

    def sync(self) -> None:
        """Make the lines durable."""
        self._lines.sync()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The line that counts of each step, ascending by step."""
    best: dict[int, dict[str, Any]] = {}
    for line in read_lines(run_dir / FILE_NAME):
        known = best.get(line["step"])
        if known is None or line["generation"] >= known["generation"]:
            best[line["step"]] = line
    return [best[step] for step in sorted(best)]

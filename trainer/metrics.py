"""`metrics.jsonl`: what each finished step was. Append-only; one object a step.

A step that is done again appears again: of the lines of a step, the one with the highest
generation counts, and the last of equals. A generation that goes on from step n makes all lines of
older ones above n void, whether it does those steps again or not (`read_metrics`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.ckpt.events import read_events
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
    """The line that counts of each step of the run's lineage, ascending by step.

    Steps that a later generation went back behind, and has not done again, are void.
    """
    lines = read_lines(run_dir / FILE_NAME)
    bases = _bases(run_dir, lines)
    best: dict[int, dict[str, Any]] = {}
    for line in lines:
        step, generation = line["step"], line["generation"]
        is_void = any(newer > generation and base < step for newer, base in bases.items())
        known = best.get(step)
        if not is_void and (known is None or generation >= known["generation"]):
            best[step] = line
    return [best[step] for step in sorted(best)]


def _bases(run_dir: Path, lines: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Generation -> the step that it went on from; as told, or as its first line shows."""
    bases: dict[int, int] = {}
    for kind in ("started", "resumed"):
        for event in read_events(run_dir, kind):
            if "base" in event:
                bases[event["generation"]] = event["base"][1] if event["base"] else 0
    for line in lines:
        before = line["step"] - 1
        bases[line["generation"]] = min(bases.get(line["generation"], before), before)
    return bases

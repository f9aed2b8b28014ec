"""Fit the few constants of `Efficiency` to measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from keepstep.planner.cluster import Cluster, Efficiency
from keepstep.planner.cost import CostModel
from keepstep.planner.errors import BadTable
from keepstep.planner.layout import Layout
from keepstep.planner.model import ModelConfig
from keepstep.planner.stack import Stack

BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm": (0.2, 0.95),
    "hbm": (0.2, 0.95),
    "link": (0.05, 0.80),
    "nic": (0.05, 0.92),
}
"""What is plausible on GPUs. NCCL's tests reach at most 0.8 of NVLink and 0.92 of InfiniBand."""

CPU_BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm": (1e-3, 1.0),
    "link": (1e-3, 1.0),
    "link_latency_s": (1e-6, 0.1),
    "host_s": (1e-6, 0.1),
    "step_host_s": (1e-5, 1.0),
    "call_s": (1e-6, 0.1),
}
"""For ranks that share a machine's cores, where launching and copying are the larger part."""


@dataclass(frozen=True)
class Measured:
    """One run: what it was, and its median seconds per step."""

    model: ModelConfig
    cluster: Cluster
    stack: Stack
    layout: Layout
    global_batch: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The fitted constants and the mean absolute relative error on the runs that were given."""

    efficiency: Efficiency
    mape: float


def fit(
    runs: Sequence[Measured],
    bounds: Mapping[str, tuple[float, float]] = BOUNDS,
    rounds: int = 40,
) -> Fit:
    """Fit the constants named in `bounds` to `runs`, starting from the first run's own.

    Descends along one constant at a time, by a factor that shrinks; the loss is the mean squared
    log error. Deterministic. Raises BadTable for no runs.
    """
    if not runs:
        raise BadTable("calibrate: no measured steps were given; run a few short layouts first")
    best = _inside(runs[0].cluster.efficiency, bounds)  # a constant of 0 starts at its least
    lowest = loss(runs, best)
    factor = 1.5
    for _ in range(rounds):
        before = lowest
        for name, (least, most) in bounds.items():
            for step in (factor, 1.0 / factor):
                value = min(most, max(least, getattr(best, name) * step))
                tried = replace(best, **{name: value})
                found = loss(runs, tried)
                if found < lowest:
                    best, lowest = tried, found
        if lowest == before:
            factor = factor**0.5
    return Fit(best, fmean(abs(_predicted(run, best) / run.seconds - 1.0) for run in runs))


def loss(runs: Sequence[Measured], efficiency: Efficiency) -> float:
    """Mean squared log error of the step times."""
    return fmean(log(_predicted(run, efficiency) / run.seconds) ** 2 for run in runs)


def _predicted(run: Measured, efficiency: Efficiency) -> float:
    cluster = replace(run.cluster, efficiency=efficiency)
    return CostModel(run.model, cluster, run.stack).step(run.layout, run.global_batch).total_s


def _inside(start: Efficiency, bounds: Mapping[str, tuple[float, float]]) -> Efficiency:
    values = {
        name: min(most, max(least, getattr(start, name))) for name, (least, most) in bounds.items()
    }
    return replace(start, **values)

"""How far the planner is from published runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepstep.planner.cluster import Cluster, Efficiency
from keepstep.planner.cost import CostModel
from keepstep.planner.layout import Layout
from keepstep.planner.memory import memory
from keepstep.planner.model import ModelConfig
from keepstep.planner.table import PublishedRun, SkippedRun


@dataclass(frozen=True)
class Priced:
    """A published run and the planner's figure for it."""

    run: PublishedRun
    layout: Layout
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative: +0.1 is 10 % too slow."""
        return self.predicted_s / self.run.step_time_s - 1.0


@dataclass(frozen=True)
class Group:
    """Runs of one source, model, GPU count and batch: are they ordered right, and picked well?

    `slower` is how much slower the predicted best was measured than the measured best.
    """

    source: str
    model: str
    gpus: int
    global_batch: int
    rows: int
    spearman: float | None
    slower: float


@dataclass(frozen=True)
class Validation:
    """All figures of a table. Errors are absolute and relative."""

    priced: tuple[Priced, ...]
    groups: tuple[Group, ...]
    skipped: tuple[SkippedRun, ...]

    @property
    def mape(self) -> float:
        """Mean absolute relative error of the step time."""
        return float(np.mean([abs(one.error) for one in self.priced])) if self.priced else 0.0

    @property
    def median_ape(self) -> float:
        """Median absolute relative error of the step time."""
        return float(np.median([abs(one.error) for one in self.priced])) if self.priced else 0.0


def validate(
    runs: Sequence[PublishedRun | SkippedRun], efficiency: Efficiency | None = None
) -> Validation:
    """Price every usable run; `efficiency` replaces the default constants."""
    priced = [price(run, efficiency) for run in runs if isinstance(run, PublishedRun)]
    skipped = tuple(run for run in runs if isinstance(run, SkippedRun))
    groups: dict[tuple[str, ModelConfig, Cluster, int], list[Priced]] = {}
    for one in priced:
        groups.setdefault(one.run.group, []).append(one)
    return Validation(
        priced=tuple(priced),
        groups=tuple(_group(members) for members in groups.values() if len(members) > 1),
        skipped=skipped,
    )


def price(run: PublishedRun, efficiency: Efficiency | None = None) -> Priced:
    """The planner's step time; of the layouts left open, the fastest that fits the memory."""
    cluster = run.cluster
    if efficiency is not None:
        cluster = replace(cluster, efficiency=efficiency)
    model = CostModel(run.model, cluster, run.stack)
    open_layouts = run.layouts
    if len(open_layouts) > 1:
        fitting = [one for one in open_layouts if _fits(run, one)]
        open_layouts = tuple(fitting) or open_layouts
    times = [(model.step(one, run.global_batch).total_s, one) for one in open_layouts]
    best = min(times, key=lambda pair: pair[0])
    return Priced(run, best[1], best[0])


def _fits(run: PublishedRun, layout: Layout) -> bool:
    need = memory(run.model, layout, run.global_batch, run.cluster, run.stack).total
    return need <= run.cluster.gpu.memory_bytes


def _group(members: Sequence[Priced]) -> Group:
    run = members[0].run
    predicted = [one.predicted_s for one in members]
    measured = [one.run.step_time_s for one in members]
    picked = measured[int(np.argmin(predicted))]
    return Group(
        source=run.source,
        model=run.model.name,
        gpus=run.cluster.gpus,
        global_batch=run.global_batch,
        rows=len(members),
        spearman=spearman(predicted, measured),
        slower=picked / min(measured) - 1.0,
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None for fewer than three, or if
    all of one side are equal."""
    if len(first) < 3:
        return None
    a, b = _ranks(first), _ranks(second)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])

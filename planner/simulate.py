"""Months of training under random failures, many runs at once, by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from keepstep.planner.survive import DAY_S, SURVIVES, Risk, Tier, TierPlan, plan_tiers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

REPAIRED = -1

ROUNDING = 1e-9  # a whole number of intervals stays one
GRID = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0, 2.8, 4.0)


@dataclass(frozen=True)
class Outcome:
    """What the runs came to: one entry per run.

    effective: useful work over time. lost_s: work done again. recovering_s: time without
    progress. failures: how many struck.
    """

    effective: Floats
    lost_s: Floats
    recovering_s: Floats
    failures: Integers

    @property
    def mean(self) -> float:
        """Mean effective training time ratio."""
        return float(self.effective.mean())

    def spread(self, low: float = 5.0, high: float = 95.0) -> tuple[float, float]:
        """Percentiles of the effective ratio over the runs."""
        return float(np.percentile(self.effective, low)), float(np.percentile(self.effective, high))


@dataclass(frozen=True)
class Trace:
    """Events of many runs: the gaps before them, what they are, and hosts under repair after them.

    A kind counts into SURVIVES; REPAIRED is a host that comes back.
    """

    gaps: Floats
    kinds: Integers
    broken: Integers


def draw(risk: Risk, days: float, runs: int, seed: int) -> Trace:
    """Poisson failures for `days`, and the repairs that follow them."""
    chance = np.random.default_rng(seed)
    shares = (risk.kinds.process, risk.kinds.host, risk.kinds.several)
    hosts_lost = np.array([0, 1, risk.kinds.at_once])
    rows = []
    for _ in range(runs):
        count = int(chance.poisson(days * DAY_S / risk.mtbf_s))
        times = np.sort(chance.uniform(0.0, days * DAY_S, count))
        kinds = chance.choice(len(SURVIVES), size=count, p=shares)
        lost = hosts_lost[kinds]
        when = np.concatenate([times, times[lost > 0] + risk.repair_s])
        what = np.concatenate([kinds, np.full((lost > 0).sum(), REPAIRED)])
        change = np.concatenate([lost, -lost[lost > 0]])
        order = np.argsort(when, kind="stable")
        rows.append((np.diff(when[order], prepend=0.0), what[order], np.cumsum(change[order])))
    width = max(len(row[0]) for row in rows) + 1
    gaps = np.full((runs, width), np.inf)
    kinds_of = np.full((runs, width), REPAIRED, dtype=np.int64)
    broken = np.zeros((runs, width), dtype=np.int64)
    for index, (gap, what, hurt) in enumerate(rows):
        gaps[index, : len(gap)] = gap
        kinds_of[index, : len(gap)] = what
        broken[index, : len(gap)] = hurt
    return Trace(gaps, kinds_of, broken)


def simulate(
    risk: Risk,
    tiers: Sequence[Tier],
    days: float,
    runs: int = 64,
    seed: int = 0,
    least_s: float = 0.0,
) -> Outcome:
    """Run the job for `days`, `runs` times. Tiers without an interval get Daly's.

    No interval is shorter than `least_s`, one step.
    """
    return replay(risk, plan_tiers(risk, tiers, least_s), days, draw(risk, days, runs, seed))


def replay(risk: Risk, plans: Sequence[TierPlan], days: float, trace: Trace) -> Outcome:
    """What `trace` does to the job with these intervals.

    Progress runs at full speed less the captures' share, spread evenly. A failure takes the work
    back to the last multiple of the interval of the first tier that survives it; nothing happens
    until it is detected and restored; a failure within that time starts the recovery anew.
    """
    end = days * DAY_S
    runs, count = trace.gaps.shape
    stretch = 1.0 + sum(plan.tier.capture_s / plan.interval_s for plan in plans)
    reach = np.array([SURVIVES.index(plan.tier.survives) for plan in plans])
    meets = np.array([int(np.argmax(reach >= kind)) for kind in range(len(SURVIVES))])
    interval = np.array([plan.interval_s for plan in plans])[meets]
    fixed = risk.detect_s + risk.restart_s
    pause = np.array([fixed + plan.tier.restore_s for plan in plans])[meets]
    clock, work, waiting = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    lost, recovering = np.zeros(runs), np.zeros(runs)
    failures, speed = np.zeros(runs, dtype=np.int64), np.ones(runs)
    for event in range(count):
        gap = np.minimum(trace.gaps[:, event], end - clock)
        idle = np.minimum(gap, waiting)
        work += (gap - idle) / stretch * speed
        recovering += idle
        clock += gap
        if not (clock < end).any():
            break
        kind = trace.kinds[:, event]
        struck = (clock < end) & (kind != REPAIRED)
        kept = np.floor(work / interval[kind] + ROUNDING) * interval[kind]
        behind = np.where(struck, np.maximum(0.0, work - kept), 0.0)
        work -= behind
        lost += behind
        waiting = np.where(struck, pause[kind], waiting - idle)
        failures += struck
        speed = _speed(risk, trace.broken[:, event])
    return Outcome(work / end, lost, recovering, failures)


def _speed(risk: Risk, broken: Integers) -> Floats:
    missing = np.maximum(0, broken - risk.spares)
    if risk.elastic:
        return np.maximum(0.0, 1.0 - missing / risk.hosts)
    return np.where(missing == 0, 1.0, 0.0)


@dataclass(frozen=True)
class BestInterval:
    """One tier's interval by simulation beside the formula's, and what each is worth."""

    name: str
    formula_s: float
    simulated_s: float
    effective_formula: float
    effective_simulated: float


def best_intervals(
    risk: Risk,
    tiers: Sequence[Tier],
    days: float,
    runs: int = 64,
    seed: int = 0,
    least_s: float = 0.0,
) -> tuple[BestInterval, ...]:
    """For each tier, the best interval on a grid around the formula's, the others held.

    All intervals meet the same failures, so that their difference is not chance.
    """
    plans = plan_tiers(risk, tiers, least_s)
    trace = draw(risk, days, runs, seed)
    at_formula = replay(risk, plans, days, trace).mean
    found = []
    for index, plan in enumerate(plans):
        scored = []
        for factor in GRID:
            changed = list(plans)
            interval = max(least_s, plan.interval_s * factor)
            changed[index] = replace(plan, interval_s=interval)
            scored.append((replay(risk, changed, days, trace).mean, interval))
        best = max(scored)
        found.append(BestInterval(plan.tier.name, plan.interval_s, best[1], at_formula, best[0]))
    return tuple(found)

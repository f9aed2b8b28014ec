"""How often to capture, and what failures cost: failure rates, tiers, Young's and Daly's formulae.

Times are seconds unless a name says otherwise. An interval is useful work between two captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from keepstep.planner.errors import PlannerError

DAY_S = 86400.0

LLAMA3_PER_HOST_DAY = 419 / 54 / 2048
"""419 unexpected interruptions in 54 days on 2,048 hosts of 8 H100 (Llama 3 report, 3.3.4)."""

RATES_PER_HOST_DAY = {
    "llama3": LLAMA3_PER_HOST_DAY,
    "meta-rsc1": 6.50e-3,
    "meta-rsc2": 2.34e-3,
    "opt-175b": 16e-3,
}
"""Meta RSC: arXiv 2410.21680. OPT-175B: metaseq chronicles, "~2 machines" of 128 a day."""


@dataclass(frozen=True)
class Kinds:
    """What share of the failures kills what; sums to 1.

    process: one rank dies and its host stays (75 % of faults are cured by a restart: DLRover).
    host: one host is lost. several: `at_once` hosts are lost together (an assumption; the OPT log
    has one such day, with 5 hosts).
    """

    process: float = 0.75
    host: float = 0.24
    several: float = 0.01
    at_once: int = 4

    def __post_init__(self) -> None:
        shares = (self.process, self.host, self.several)
        if min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-9:
            raise PlannerError(f"shares of failure kinds are {shares}; they must add up to 1")


FALLBACK = 0.02
"""How often a tier is needed though a quicker one should have done: an assumption."""

SURVIVES = ("process", "host", "several")
"""Kinds by severity: a tier that survives one survives those before it."""


@dataclass(frozen=True)
class Tier:
    """Where a state is kept: what a capture stalls training by, what it survives, how long a
    restore from it takes.

    `interval_s` fixes the interval; None leaves it to the planner.
    """

    name: str
    capture_s: float
    restore_s: float
    survives: str
    interval_s: float | None = None

    def __post_init__(self) -> None:
        if self.survives not in SURVIVES:
            raise PlannerError(
                f"tier {self.name} survives {self.survives!r}: not one of {SURVIVES}"
            )
        for name in ("capture_s", "restore_s"):
            if not 0 <= getattr(self, name) < inf:
                raise PlannerError(
                    f"tier {self.name}: {name} is {getattr(self, name)}; needs a time, >= 0"
                )
        if self.interval_s is not None and not 0 < self.interval_s < inf:
            raise PlannerError(f"tier {self.name}: interval_s is {self.interval_s}; needs > 0")


@dataclass(frozen=True)
class Risk:
    """A job on `hosts` hosts and what may hit it.

    detect_s: from the failure to its verdict. restart_s: from the verdict to the restore (new
    processes, new groups). repair_s: until a lost host, or one like it, is back. spares: hosts
    held ready. elastic: the job goes on with fewer hosts, else it waits for the full number.
    """

    hosts: int
    failures_per_host_day: float = LLAMA3_PER_HOST_DAY
    kinds: Kinds = Kinds()
    detect_s: float = 5.0
    restart_s: float = 10.0
    repair_s: float = 4 * 3600.0
    spares: int = 0
    elastic: bool = True

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise PlannerError(f"a job of {self.hosts} hosts; needs >= 1")
        if not 0 < self.failures_per_host_day < inf:
            raise PlannerError(f"{self.failures_per_host_day} failures per host-day; needs > 0")
        if self.spares < 0:
            raise PlannerError(f"{self.spares} spares; needs >= 0")
        for name in ("detect_s", "restart_s", "repair_s"):
            if not 0 <= getattr(self, name) < inf:
                raise PlannerError(f"{name} is {getattr(self, name)}; needs a time, >= 0")

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the whole job."""
        return DAY_S / (self.hosts * self.failures_per_host_day)


def young_interval(capture_s: float, mtbf_s: float) -> float:
    """The interval T = sqrt(2 d M) that loses least to captures and repeated work (Young 1974)."""
    return sqrt(2.0 * capture_s * mtbf_s)


def daly_interval(capture_s: float, mtbf_s: float) -> float:
    """Daly's higher order of it, which also holds where d is not small beside M (Daly 2006)."""
    ratio = capture_s / (2.0 * mtbf_s)
    if ratio >= 1.0:
        return mtbf_s
    series = 1.0 + sqrt(ratio) / 3.0 + ratio / 9.0
    return young_interval(capture_s, mtbf_s) * series - capture_s


def young_loss(capture_s: float, mtbf_s: float, interval_s: float | None = None) -> float:
    """Share lost to captures and repeated work: d/T + T/2M; at the best interval sqrt(2d/M)."""
    interval = interval_s or young_interval(capture_s, mtbf_s)
    return capture_s / interval + interval / (2.0 * mtbf_s) if interval else 0.0


def restart_loss(restart_s: float, mtbf_s: float) -> float:
    """Share lost to detecting and recovering: R/M."""
    return restart_s / mtbf_s


def daly_effective(capture_s: float, mtbf_s: float, restart_s: float, interval_s: float) -> float:
    """Effective share of the time with exponential failures, nothing neglected (Daly 2006).

    A segment of T + d is repeated until it passes; each failure costs R, during which failures
    strike as well: T / (M e^(R/M) (e^((T+d)/M) - 1)).
    """
    segment = exp((interval_s + capture_s) / mtbf_s) - 1.0
    return interval_s / (mtbf_s * exp(restart_s / mtbf_s) * segment)


@dataclass(frozen=True)
class TierPlan:
    """A tier with its interval, and the failures per second for which it is the one that helps."""

    tier: Tier
    interval_s: float
    failures_per_s: float

    @property
    def lost_per_failure_s(self) -> float:
        """Mean useful work done again when it is needed."""
        return self.interval_s / 2.0


@dataclass(frozen=True)
class Expectation:
    """Closed form: shares of the time, and the intervals they are for."""

    tiers: tuple[TierPlan, ...]
    mtbf_s: float
    capture_share: float
    rework_share: float
    recovery_share: float
    capacity: float

    @property
    def effective(self) -> float:
        """Effective training time ratio: what is left for new work at full size."""
        lost = self.capture_share + self.rework_share + self.recovery_share
        return max(0.0, 1.0 - lost) * self.capacity


def plan_tiers(risk: Risk, tiers: Sequence[Tier], least_s: float = 0.0) -> tuple[TierPlan, ...]:
    """The interval of each tier by Daly's formula, against the failures that only it survives.

    A failure is met by the quickest tier that survives it. A tier that another of equal reach
    comes before is its fallback: it is written as if FALLBACK of those failures came to it.
    Raises PlannerError if no tier survives some kind that occurs.
    """
    ordered = sorted(tiers, key=lambda tier: (SURVIVES.index(tier.survives), tier.restore_s))
    plans, below = [], 0.0
    for tier in ordered:
        reach = _share_up_to(risk.kinds, tier.survives)
        rate = max(0.0, reach - below) / risk.mtbf_s
        below = max(below, reach)
        meets = rate or FALLBACK * getattr(risk.kinds, tier.survives) / risk.mtbf_s
        free = daly_interval(tier.capture_s, 1.0 / meets) if meets else DAY_S
        interval = tier.interval_s or free
        plans.append(TierPlan(tier, max(interval, least_s), rate))
    if below < 1.0 - 1e-9:
        raise PlannerError(
            f"no tier survives {100 * (1 - below):.1f} % of the failures; add one that survives"
            " 'several' (a store)"
        )
    return tuple(plans)


def _share_up_to(kinds: Kinds, survives: str) -> float:
    upto = SURVIVES[: SURVIVES.index(survives) + 1]
    return float(sum(getattr(kinds, name) for name in upto))


def expect(risk: Risk, tiers: Sequence[Tier], least_s: float = 0.0) -> Expectation:
    """First-order expectation for the tiers' intervals; `least_s` is the shortest (one step)."""
    plans = plan_tiers(risk, tiers, least_s)
    fixed = risk.detect_s + risk.restart_s
    return Expectation(
        tiers=plans,
        mtbf_s=risk.mtbf_s,
        capture_share=sum(plan.tier.capture_s / plan.interval_s for plan in plans),
        rework_share=sum(plan.failures_per_s * plan.lost_per_failure_s for plan in plans),
        recovery_share=sum(plan.failures_per_s * (fixed + plan.tier.restore_s) for plan in plans),
        capacity=capacity(risk, risk.spares),
    )


def broken_hosts(risk: Risk) -> float:
    """Mean number of hosts under repair at any moment (losses of hosts x repair time)."""
    lost = risk.kinds.host + risk.kinds.several * risk.kinds.at_once
    return lost * risk.repair_s / risk.mtbf_s


def capacity(risk: Risk, spares: int) -> float:
    """Mean share of full speed that `spares` leave: hosts under repair are Poisson (M/G/inf).

    elastic: each host beyond the spares costs its part; else all wait while one is missing.
    """
    mean = broken_hosts(risk)
    share, chance = 0.0, exp(-mean)
    for broken in range(int(mean + 12 * sqrt(mean + 1)) + spares + 1):
        missing = max(0, broken - spares)
        if risk.elastic:
            share += chance * max(0.0, 1.0 - missing / risk.hosts)
        elif missing == 0:
            share += chance
        chance *= mean / (broken + 1)
    return min(1.0, share)


def spares_worth(risk: Risk, most: int = 64) -> int:
    """The number of spares at which the work per host paid for, spares included, is highest."""

    def value(spares: int) -> float:
        return capacity(risk, spares) * risk.hosts / (risk.hosts + spares)

    return max(range(most + 1), key=value)

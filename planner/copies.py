"""The chance that all copies of some region in memory die before they are made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from keepstep.planner.errors import PlannerError
from keepstep.planner.survive import DAY_S


@dataclass(frozen=True)
class CopyRisk:
    """What can take copies away.

    host_losses_per_day: of one host. again_s: from a loss to new copies elsewhere. domain_of: the
    failure domain (rack, switch) of each host. domain_losses_per_day: of one domain, all its
    hosts at once.
    """

    host_losses_per_day: float
    again_s: float
    domain_of: tuple[int, ...] = ()
    domain_losses_per_day: float = 0.0


def ring_copies(hosts: int, copies: int, stride: int = 1) -> tuple[tuple[int, ...], ...]:
    """Host h's images are on h, h + stride, ... : one set of holders per host."""
    if copies < 1:
        raise PlannerError(f"{copies} copies; needs >= 1")
    if copies > hosts:
        raise PlannerError(f"{copies} copies need as many hosts; there are {hosts}")
    return tuple(
        tuple((host + place * stride) % hosts for place in range(copies)) for host in range(hosts)
    )


def group_copies(hosts: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """Hosts in groups of `copies` hold each other's images: fewer sets of holders to lose."""
    if copies < 1 or hosts % copies:
        raise PlannerError(f"{hosts} hosts are no multiple of groups of {copies}")
    return tuple(
        tuple(range(first, first + copies))
        for first in range(0, hosts, copies)
        for _ in range(copies)
    )


def loss_per_day(holders: Sequence[Sequence[int]], risk: CopyRisk) -> float:
    """Rate at which some set of holders is lost whole.

    Independent losses: r l (l w)^(r-1) for each distinct set of r hosts, l the rate of a host, w
    the time until new copies stand (the others fail within w of the first). Domains: every one
    that contains a whole set. Sums of rare events, so an upper bound where they overlap.
    """
    sets = {frozenset(each) for each in holders}
    rate, window = risk.host_losses_per_day, risk.again_s / DAY_S
    alone = sum(len(each) * rate * (rate * window) ** (len(each) - 1) for each in sets)
    if not risk.domain_of:
        return alone
    inside = Counter(
        risk.domain_of[min(each)]
        for each in sets
        if len({risk.domain_of[host] for host in each}) == 1
    )
    return alone + len(inside) * risk.domain_losses_per_day


def loss_chance(holders: Sequence[Sequence[int]], risk: CopyRisk, days: float) -> float:
    """Chance of at least one such loss in `days`. The state then comes from disk or the store."""
    return 1.0 - exp(-loss_per_day(holders, risk) * days)


def simulated_losses(
    holders: Sequence[Sequence[int]], risk: CopyRisk, days: float, seed: int
) -> int:
    """Losses of whole sets in `days` of random host losses: a check on the formula."""
    hosts = 1 + max(host for each in holders for host in each)
    chance = np.random.default_rng(seed)
    count = int(chance.poisson(hosts * risk.host_losses_per_day * days))
    times = np.sort(chance.uniform(0.0, days, count))
    who = chance.integers(0, hosts, count)
    of_host: dict[int, list[frozenset[int]]] = {}
    for each in {frozenset(each) for each in holders}:
        for host in each:
            of_host.setdefault(host, []).append(each)
    down_until = np.zeros(hosts)
    window, losses = risk.again_s / DAY_S, 0
    for time, host in zip(times.tolist(), who.tolist(), strict=True):
        down_until[host] = time + window
        for each in of_host.get(host, ()):
            losses += all(down_until[member] > time for member in each)
    return losses

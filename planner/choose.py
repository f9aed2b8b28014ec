"""The layout for what is left after a loss: fast, and near the old one when times are close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from keepstep.planner.cluster import Cluster
from keepstep.planner.cost import CostModel
from keepstep.planner.errors import BadLayout
from keepstep.planner.layout import Layout
from keepstep.planner.layouts import Constraints, divisors
from keepstep.planner.model import ModelConfig
from keepstep.planner.movement import moved_bytes
from keepstep.planner.plan import explain_refusal
from keepstep.planner.stack import Stack, usual_stack

CLOSE = 1.05
"""Layouts within 5 % of the fastest are equals; the one that moves least wins."""

COMPARED = 12
UNEVEN_PP_MAX = 8  # deeper pipelines only where the layers divide
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Hosts:
    """What is left: a cluster of that many nodes, and each one's place in the old order.

    came_from[h] is None for a host that was not in the old layout (a spare).
    """

    cluster: Cluster
    came_from: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The layout, its step time, the bytes that hosts must fetch for it, and why it was chosen."""

    layout: Layout
    step_s: float
    moved_bytes: float
    reason: str


def choose_layout(
    model: ModelConfig,
    hosts: Hosts,
    constraints: Constraints,
    current: Layout | None = None,
    stack: Stack | None = None,
) -> Choice:
    """The best layout for `hosts`; of those within 5 % of the fastest, the one that moves least.

    The global batch stays as it is. Not every GPU need be used: hosts over are spares. Of each of
    `recomputes`, `zeros`, `reduce_bytes` and `sequence_parallel` in `constraints`, the first that
    fits is taken, in that order of trying. Raises BadLayout with the commonest reason if none fits.
    """
    costs = CostModel(model, hosts.cluster, stack or usual_stack(hosts.cluster.cores_per_node))
    timed: list[tuple[float, Layout]] = []
    reasons: Counter[str] = Counter()
    for base in _bases(model, hosts.cluster, constraints):
        timed += _fitting(costs, constraints, base, current.virtual if current else 1, reasons)
    if not timed:
        most = reasons.most_common(1)[0][0] if reasons else "no sizes fit the batch"
        raise BadLayout(f"no layout runs {model.name} on {hosts.cluster.gpus} GPUs: {most}")
    timed.sort(key=lambda pair: pair[0])
    if current is None:
        best = timed[0]
        return Choice(best[1], best[0], 0.0, f"fastest of {len(timed)} that can run")
    close = [pair for pair in timed if pair[0] <= CLOSE * timed[0][0]][:COMPARED]
    per_host = hosts.cluster.gpus_per_node
    came = hosts.came_from or tuple(range(hosts.cluster.nodes))
    moves = [moved_bytes(model, current, layout, came, per_host) for _, layout in close]
    index = min(range(len(close)), key=lambda i: (moves[i], close[i][0]))
    seconds, layout = close[index]
    slower = 100.0 * (seconds / timed[0][0] - 1.0)
    reason = (
        f"moves {moves[index] / 1e9:.1f} GB, least of {len(close)} within 5 % of the fastest"
        f" ({slower:.1f} % slower than {timed[0][1]})"
        if index
        else f"fastest of {len(timed)}, and moves {moves[0] / 1e9:.1f} GB, least of {len(close)}"
    )
    return Choice(layout, seconds, moves[index], reason)


def _bases(model: ModelConfig, cluster: Cluster, constraints: Constraints) -> Iterator[Layout]:
    """Sizes of the axes; dp as large as the batch and the GPUs allow."""
    limit = constraints.tp_max or cluster.gpus_per_node
    for tp in (n for n in divisors(model.kv_heads) if n <= limit):
        deepest = min(model.layers, cluster.gpus // tp, constraints.pp_max or model.layers)
        for pp in range(1, deepest + 1):
            if model.layers % pp and pp > UNEVEN_PP_MAX:
                continue
            most = cluster.gpus // (tp * pp)
            most = min(most, constraints.global_batch // pp)  # every stage needs a micro batch
            widest = max((n for n in divisors(constraints.global_batch) if n <= most), default=0)
            if widest:
                yield Layout(dp_shard=widest, tp=tp, pp=pp)


def _fitting(
    costs: CostModel, constraints: Constraints, base: Layout, virtual: int, reasons: Counter[str]
) -> Iterator[tuple[float, Layout]]:
    """The micro batches of `base` that can run, each with the cheapest savings that make it fit.

    A larger micro batch needs at least the savings of a smaller one.
    """
    per_replica = constraints.global_batch // base.dp
    chunks = virtual if base.pp > 1 and costs.model.layers % (base.pp * virtual) == 0 else 1
    savings = _savings(base, constraints)
    first = 0
    for micro in (n for n in MICRO_BATCHES if n <= constraints.micro_batch_max):
        count, rest = divmod(per_replica, micro)
        if rest or count < base.pp:
            continue
        interleaved = chunks if count % base.pp == 0 else 1
        while first < len(savings):
            layout = replace(base, micro_batch=micro, virtual=interleaved, **savings[first])
            reason = explain_refusal(costs, layout, constraints)
            if reason is None:
                yield costs.step(layout, constraints.global_batch).total_s, layout
                break
            reasons[reason] += 1
            first += 1


def _savings(base: Layout, constraints: Constraints) -> list[dict[str, Any]]:
    """The ways to need less memory, as changes of `base`, cheapest first."""
    zeros = constraints.zeros if base.dp > 1 else constraints.zeros[:1]
    return [
        {
            "recompute": recompute,
            "zero": zero,
            "dp_shard": base.dp if zero else 1,
            "dp_replicate": 1 if zero else base.dp,
            "reduce_bytes": constraints.reduce_bytes[0],
            "sequence_parallel": constraints.sequence_parallel[0],
        }
        for recompute in constraints.recomputes
        for zero in zeros
    ]

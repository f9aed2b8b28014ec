"""Everything that the planner says of one layout, and the search over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.planner.budget import Budget, budget
from keepstep.planner.cluster import GIB, Cluster
from keepstep.planner.cost import CostModel, StepCost
from keepstep.planner.layout import Layout
from keepstep.planner.layouts import (
    Constraints,
    Refused,
    refusal,
    sizes,
    structural_refusal,
    variants,
)
from keepstep.planner.memory import USABLE, Memory, memory
from keepstep.planner.model import ModelConfig
from keepstep.planner.stack import Stack, usual_stack

INEXACT_MARGIN = 0.02
"""A 2-byte gradient reduction must win by this much to be put before a 4-byte one."""


@dataclass(frozen=True)
class Plan:
    """One layout, priced. Utilisations are of the peak of the GPUs in use, 0 to 1."""

    layout: Layout
    cost: StepCost
    memory: Memory
    budget: Budget
    mfu: float
    hfu: float
    tokens_per_s: float

    def days(self, tokens: float) -> float:
        """Days of uninterrupted training for `tokens`."""
        return tokens / self.tokens_per_s / 86400.0

    def dollars(self, tokens: float, per_gpu_hour: float) -> float:
        """Price of that."""
        return self.days(tokens) * 24.0 * self.layout.gpus * per_gpu_hour


@dataclass(frozen=True)
class Search:
    """All layouts that can run, fastest first, as (rank key in seconds, layout), and the rest."""

    ranked: tuple[tuple[float, Layout], ...]
    refused: tuple[Refused, ...]

    def best(self, count: int) -> tuple[Layout, ...]:
        """The fastest layouts, one for each (dp, tp, pp)."""
        found: dict[tuple[int, int, int], Layout] = {}
        for _, layout in self.ranked:
            if len(found) == count:
                break
            found.setdefault((layout.dp, layout.tp, layout.pp), layout)
        return tuple(found.values())


def make_plan(model: CostModel, layout: Layout, global_batch: int) -> Plan:
    """Price `layout` in full. It is not checked: see `explain_refusal`."""
    cost = model.step(layout, global_batch)
    peak = cost.total_s * layout.gpus * model.cluster.gpu.peak_flops
    return Plan(
        layout=layout,
        cost=cost,
        memory=memory(model.model, layout, global_batch, model.cluster, model.stack),
        budget=budget(model, layout, global_batch, cost),
        mfu=model.model_flops(global_batch) / peak,
        hfu=model.hardware_flops(layout, global_batch) / peak,
        tokens_per_s=global_batch * model.model.seq_len / cost.total_s,
    )


def explain_refusal(model: CostModel, layout: Layout, constraints: Constraints) -> str | None:
    """The one reason why `layout` cannot run, memory included; None if it can."""
    reason = refusal(model.model, model.cluster, layout, constraints)
    return reason or _memory_refusal(model, layout, constraints.global_batch)


def _memory_refusal(model: CostModel, layout: Layout, global_batch: int) -> str | None:
    need = memory(model.model, layout, global_batch, model.cluster, model.stack)
    have = USABLE * model.cluster.gpu.memory_bytes
    if need.total > have:
        return f"it needs {need.total / GIB:.1f} GiB per GPU; {have / GIB:.1f} are usable"
    if need.arenas_per_host > model.cluster.host_memory_bytes:
        host = model.cluster.host_memory_bytes / GIB
        return (
            f"its arenas need {need.arenas_per_host / GIB:.0f} GiB per host; there are {host:.0f}"
        )
    return None


def search(
    model: ModelConfig, cluster: Cluster, constraints: Constraints, stack: Stack | None = None
) -> tuple[CostModel, Search]:
    """Price every layout that uses all GPUs, under `stack` or the cluster's usual one.

    The cost model comes back for `make_plan`.
    """
    costs = CostModel(model, cluster, stack or usual_stack(cluster.cores_per_node))
    ranked: list[tuple[float, Layout]] = []
    refused: list[Refused] = []
    for dp, tp, pp in sizes(cluster):
        base = Layout(dp_shard=dp, tp=tp, pp=pp)
        reason = structural_refusal(model, cluster, base, constraints)
        if reason:
            refused.append(Refused(base, reason))
            continue
        if constraints.global_batch % dp:
            batch = constraints.global_batch
            refused.append(Refused(base, f"global batch {batch} is no multiple of dp {dp}"))
            continue
        for layout in variants(model, constraints, base):
            reason = explain_refusal(costs, layout, constraints)
            if reason:
                refused.append(Refused(layout, reason))
                continue
            seconds = costs.step(layout, constraints.global_batch).total_s
            ranked.append((_key(seconds, layout), layout))
    ranked.sort(key=lambda pair: pair[0])
    return costs, Search(tuple(ranked), tuple(refused))


def _key(seconds: float, layout: Layout) -> float:
    return seconds * (1.0 + INEXACT_MARGIN) if layout.reduce_bytes == 2 else seconds


def order_note(plans: Sequence[Plan]) -> str | None:
    """Why a faster layout stands below a slower one, if one does: see INEXACT_MARGIN."""
    slowest_exact_s = 0.0
    for plan in plans:
        if plan.layout.reduce_bytes != 2:
            slowest_exact_s = max(slowest_exact_s, plan.cost.total_s)
        elif plan.cost.total_s < slowest_exact_s:
            return (
                f"reduce=bf16 adds gradients up less exactly: it stands below a slower reduce=fp32"
                f" unless it is {100 * INEXACT_MARGIN:g} % faster."
            )
    return None


def why_first(plans: Sequence[Plan]) -> str:
    """One sentence: what the first plan spends less on than the next, and what more."""
    if not plans:
        return "No layout can run; the reasons are listed."
    first = plans[0]
    if len(plans) == 1:
        return f"{first.layout} is the only one that can run."
    second = plans[1]
    gain = second.cost.total_s - first.cost.total_s
    saved = {name: second_s - first_s for name, first_s, second_s in _parts(first, second)}
    most = max(saved, key=lambda name: saved[name])
    least = min(saved, key=lambda name: saved[name])
    sentence = (
        f"{first.layout} is {100 * gain / first.cost.total_s:.1f} % faster than {second.layout}:"
        f" it saves {saved[most]:.3g} s of {most}"
    )
    if saved[least] < 0:
        sentence += f" and pays {-saved[least]:.3g} s more for {least}"
    return sentence + "."


def _parts(first: Plan, second: Plan) -> list[tuple[str, float, float]]:
    a, b = first.cost, second.cost
    return [
        ("compute", a.compute_s, b.compute_s),
        ("exposed tp traffic", a.tp_s, b.tp_s),
        ("exposed pp traffic", a.pp_s, b.pp_s),
        ("exposed dp traffic", a.dp_s, b.dp_s),
        ("bubble", a.bubble_s, b.bubble_s),
        ("optimizer", a.optimizer_s, b.optimizer_s),
    ]

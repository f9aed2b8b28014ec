"""The planner's answers as plain values, ready for JSON; the tables show the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from keepstep.planner.budget import AxisBudget, tokens_to_hide_dp
from keepstep.planner.calibrate import Fit, Measured
from keepstep.planner.cluster import GIB, Cluster
from keepstep.planner.comm import axis
from keepstep.planner.copies import CopyRisk, loss_chance
from keepstep.planner.cost import CostModel
from keepstep.planner.layouts import Constraints, Refused
from keepstep.planner.plan import Plan, order_note, why_first
from keepstep.planner.simulate import best_intervals, simulate
from keepstep.planner.survive import Risk, Tier, broken_hosts, expect, spares_worth
from keepstep.planner.validate import Validation

Report = dict[str, Any]


def plan_report(
    costs: CostModel,
    constraints: Constraints,
    plans: Sequence[Plan],
    refused: Sequence[Refused],
    tokens: float,
    own: Plan | None,
    own_refusal: str | None,
    *,
    all_refused: bool,
) -> Report:
    """Best layouts, why the first wins, the user's own, and what cannot run."""
    model, cluster = costs.model, costs.cluster
    counted = Counter(_kind(one.reason) for one in refused)
    examples = {_kind(one.reason): one for one in reversed(refused)}
    report: Report = {
        "model": {**asdict(model), "params": model.params},
        "cluster": {"name": cluster.name, "gpu": cluster.gpu.name, "gpus": cluster.gpus},
        "global_batch": constraints.global_batch,
        "tokens": tokens,
        "best": [plan_values(costs, one, tokens) for one in plans],
        "why": why_first(plans),
        "note": order_note(plans),
        "own": plan_values(costs, own, tokens) if own else None,
        "own_refusal": own_refusal,
        "refusals": [
            {"count": count, "example": str(examples[kind].layout), "reason": examples[kind].reason}
            for kind, count in counted.most_common()
        ],
    }
    if plans:
        layout = plans[0].layout
        rate = axis(cluster, layout.dp_shard, layout.tp).bytes_per_s
        peak = cluster.gpu.peak_flops * layout.tp * layout.pp  # of a replica; so is the rate
        report["tokens_per_replica"] = {
            "given": constraints.global_batch // layout.dp * model.seq_len,
            "to_hide_dp_at_peak": tokens_to_hide_dp(
                layout.reduce_bytes, layout.zero, peak, rate * layout.tp * layout.pp
            ),
        }
    if all_refused:
        report["refused"] = [{"layout": str(one.layout), "reason": one.reason} for one in refused]
    return report


def _kind(reason: str) -> str:
    """The reason without its numbers."""
    return "".join(letter for letter in reason if not (letter.isdigit() or letter == "."))


def plan_values(costs: CostModel, plan: Plan, tokens: float) -> Report:
    """One layout: seconds by part, bytes and budget by axis, memory, rates, days and dollars."""
    cost, memory = plan.cost, plan.memory
    return {
        "layout": str(plan.layout),
        "gpus": plan.layout.gpus,
        "step_s": cost.total_s,
        "seconds": {
            "compute": cost.compute_s,
            "tp": cost.tp_s,
            "pp": cost.pp_s,
            "dp": cost.dp_s,
            "bubble": cost.bubble_s,
            "optimizer": cost.optimizer_s,
        },
        "traffic": {
            "dp": _axis_values(plan.budget.dp),
            "tp": _axis_values(plan.budget.tp),
            "pp": _axis_values(plan.budget.pp),
        },
        "memory_gib": {
            "weights": memory.weights / GIB,
            "gradients": memory.gradients / GIB,
            "optimizer": memory.optimizer / GIB,
            "activations": memory.activations / GIB,
            "buffers": memory.buffers / GIB,
            "total": memory.total / GIB,
            "arenas_per_host": memory.arenas_per_host / GIB,
        },
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "tokens_per_s": plan.tokens_per_s,
        "days": plan.days(tokens),
        "dollars": plan.dollars(tokens, costs.cluster.dollars_per_gpu_hour),
    }


def _axis_values(budget: AxisBudget) -> Report:
    bounded = budget.hide_s > 0
    return {
        "bytes_per_gpu": budget.bytes,
        "wire_s": budget.wire_s,
        "hide_s": budget.hide_s,
        "exposed_s": budget.exposed_s,
        "used": budget.used if bounded or budget.wire_s == 0 else None,
        "headroom": budget.headroom if bounded or budget.wire_s == 0 else None,
    }


def survival_report(
    risk: Risk,
    tiers: Sequence[Tier],
    days: float,
    runs: int,
    seed: int,
    step_s: float,
    holders: Sequence[Sequence[int]],
    danger: CopyRisk,
) -> Report:
    """Intervals by formula and by simulation, the effective time and its spread, spares, copies."""
    expected = expect(risk, tiers, step_s)
    outcome = simulate(risk, tiers, days, runs, seed, step_s)
    low, high = outcome.spread()
    return {
        "hosts": risk.hosts,
        "days": days,
        "failures_per_1000_host_days": 1000.0 * risk.failures_per_host_day,
        "mtbf_s": risk.mtbf_s,
        "expected_failures": days * 86400.0 / risk.mtbf_s,
        "tiers": [
            {
                "name": plan.tier.name,
                "survives": plan.tier.survives,
                "capture_s": plan.tier.capture_s,
                "restore_s": plan.tier.restore_s,
                "interval_s": plan.interval_s,
                "interval_steps": max(1, round(plan.interval_s / step_s)),
                "simulated_interval_s": best.simulated_s,
                "failures_per_day": plan.failures_per_s * 86400.0,
                "lost_per_failure_s": plan.lost_per_failure_s,
            }
            for plan, best in zip(
                expected.tiers, best_intervals(risk, tiers, days, runs, seed, step_s), strict=True
            )
        ],
        "effective": expected.effective,
        "shares": {
            "captures": expected.capture_share,
            "work_done_again": expected.rework_share,
            "recovery": expected.recovery_share,
            "missing_hosts": 1.0 - expected.capacity,
        },
        "simulated": {
            "runs": runs,
            "seed": seed,
            "effective": outcome.mean,
            "effective_p5": low,
            "effective_p95": high,
            "lost_s": float(outcome.lost_s.mean()),
            "recovering_s": float(outcome.recovering_s.mean()),
            "failures": float(outcome.failures.mean()),
        },
        "hosts_under_repair": broken_hosts(risk),
        "spares_worth": spares_worth(risk),
        "all_copies_lost_chance": loss_chance(holders, danger, days),
        "copies": len(holders[0]),
    }


def validation_report(validation: Validation, *, with_rows: bool) -> Report:
    """Errors in per cent over all rows, by source and by group; what was left out, and why."""
    sources: dict[str, list[float]] = {}
    for one in validation.priced:
        sources.setdefault(one.run.source, []).append(100.0 * one.error)
    report: Report = {
        "mape_pct": 100.0 * validation.mape,
        "median_ape_pct": 100.0 * validation.median_ape,
        "rows": len(validation.priced),
        "groups": [
            {
                "source": group.source,
                "model": group.model,
                "gpus": group.gpus,
                "global_batch": group.global_batch,
                "rows": group.rows,
                "spearman": group.spearman,
                "chosen_slower_pct": 100.0 * group.slower,
            }
            for group in validation.groups
        ],
        "sources": [
            {
                "source": source,
                "rows": len(errors),
                "mape_pct": sum(abs(error) for error in errors) / len(errors),
                "bias_pct": sum(errors) / len(errors),
            }
            for source, errors in sources.items()
        ],
        "skipped": [
            {"row": one.row, "source": one.source, "model": one.model, "reason": one.reason}
            for one in validation.skipped
        ],
        "planner_chose": dict(
            Counter(column for one in validation.priced for column in one.run.chosen)
        ),
    }
    if with_rows:
        report["priced"] = [
            {
                "row": one.run.row,
                "source": one.run.source,
                "model": one.run.model.name,
                "layout": str(one.layout),
                "chosen": list(one.run.chosen),
                "measured_s": one.run.step_time_s,
                "predicted_s": one.predicted_s,
                "error_pct": 100.0 * one.error,
            }
            for one in validation.priced
        ]
    return report


def calibration_document(cluster: Cluster, fitted: Fit, runs: Sequence[Measured]) -> Report:
    """A cluster's TOML with the fitted constants."""
    kept = {
        key: value
        for key, value in asdict(cluster).items()
        if key not in ("gpu", "efficiency", "name")
    }
    return {
        "cluster": kept,
        "gpu": asdict(cluster.gpu),
        "efficiency": asdict(fitted.efficiency),
        "fit": {
            "mape_pct": 100.0 * fitted.mape,
            "runs": [f"{run.layout}: {run.seconds:.4f} s" for run in runs],
        },
    }

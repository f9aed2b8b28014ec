"""From a run's `metrics.jsonl` to a measured step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from keepstep.planner.calibrate import Measured
from keepstep.planner.cluster import Cluster
from keepstep.planner.errors import BadTable
from keepstep.planner.layout import Layout
from keepstep.planner.model import ModelConfig
from keepstep.planner.stack import usual_stack


def measured_run(
    model: ModelConfig,
    cluster: Cluster,
    config: Mapping[str, Any],
    name: str,
    lines: Sequence[str],
    skip: int,
) -> Measured:
    """The median step of a run, its first `skip` steps left out.

    The layout is that of the last line; steps of another one are left out. `config` is the run's
    configuration without [model]: [batch] micro_batch, [numerics] activation_checkpointing.
    Raises BadTable naming the file and line.
    """
    steps = [_line(name, number, text) for number, text in enumerate(lines, start=1) if text]
    if not steps:
        raise BadTable(f"{name}: has no steps")
    sizes, span = steps[-1]["layout"], steps[-1]["samples"]
    same = [step for step in steps[skip:] if step["layout"] == sizes]
    if not same:
        raise BadTable(f"{name}: {len(steps)} steps, none left after the first {skip}")
    micro = int(config.get("batch", {}).get("micro_batch", 1))
    return Measured(
        model=model,
        cluster=cluster,
        stack=usual_stack(cluster.cores_per_node),
        layout=run_layout(sizes, micro, config),
        global_batch=int(span[1]) - int(span[0]),
        seconds=median(step["step_ms"] for step in same) / 1000.0,
    )


def run_layout(sizes: Mapping[str, int], micro_batch: int, config: Mapping[str, Any]) -> Layout:
    """The trainer's layout: weights sharded (gathered once a step under a pipeline), fp32 sums."""
    replicate = int(sizes.get("dp_replicate", 1))
    pp = int(sizes["pp"])
    checkpointing = config.get("numerics", {}).get("activation_checkpointing", False)
    return Layout(
        dp_replicate=replicate,
        dp_shard=int(sizes["dp"]) // replicate,
        tp=int(sizes["tp"]),
        pp=pp,
        virtual=int(config.get("parallel", {}).get("virtual", 1)) if pp > 1 else 1,
        micro_batch=micro_batch,
        recompute="full" if checkpointing else "none",
        zero=3 if pp == 1 else 1,
    )


def _line(name: str, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTable(f"{name} line {number}: no JSON ({error.msg})") from error
    for key in ("layout", "samples", "step_ms"):
        if not isinstance(line, dict) or key not in line:
            raise BadTable(f"{name} line {number}: lacks {key}")
    return dict(line)

"""What the commands print for machines: the shapes of their JSON. Add keys; never change one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from keepstep.ckpt import gc, verify
from keepstep.ckpt.entry import Record
from keepstep.ckpt.inspect import (
    CheckpointRow,
    TensorRow,
    groups,
    layout_text,
    placement_text,
)
from keepstep.ckpt.lineage import Committed, Lineage, Status
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.retention import Policy
from keepstep.views import age_s


def commit_json(commit: Committed) -> dict[str, Any]:
    """One commit, as all commands show it."""
    return {
        "step": commit.state.step,
        "generation": commit.state.generation,
        "status": commit.status.value,
        "reason": commit.reason or None,
        "committed_at": commit.at,
        "entry": commit.seq,
        "size_bytes": commit.size_bytes,
    }


def ls_json(
    url: str, lineage: Lineage, rows: Iterable[CheckpointRow], now: datetime
) -> dict[str, Any]:
    """`ls`."""
    checkpoints = [
        {
            **commit_json(row.commit),
            "age_s": round(age_s(row.commit.at, now), 3),
            "layout": layout_text(row.mesh),
            "verdict": row.verdict or None,
        }
        for row in rows
    ]
    retired = sum(commit.status is Status.RETIRED for commit in lineage.commits)
    return {"store": url, "job": lineage.job, "checkpoints": checkpoints, "retired": retired}


def show_json(
    url: str,
    lineage: Lineage,
    chosen: tuple[Committed, Manifest] | None,
    rows: Iterable[TensorRow] | None,
    records: Iterable[Record] | None,
) -> dict[str, Any]:
    """`show`. Tensors and log only if they were asked for."""
    document: dict[str, Any] = {
        "store": url,
        "job": lineage.job,
        "term": lineage.term,
        "term_by": lineage.term_by,
        "entries": lineage.next_seq,
        "live": [commit.state.step for commit in lineage.live],
        "generations": lineage.generations,
        "end": lineage.end,
        "ignored": [asdict(each) for each in lineage.ignored],
        "checkpoint": None,
    }
    if chosen is not None:
        commit, manifest = chosen
        document["checkpoint"] = {
            **commit_json(commit),
            "layout": layout_text(manifest.mesh),
            "mesh": {axis.name: axis.size for axis in manifest.mesh.axes},
            "images": manifest.images,
            "values": manifest.values,
            "plan_digest": manifest.plan_digest,
            "parts": [asdict(group) for group in groups(manifest)],
        }
    if rows is not None:
        document["tensors"] = [_tensor_json(row) for row in rows]
    if records is not None:
        document["log"] = list(records)
    return document


def _tensor_json(row: TensorRow) -> dict[str, Any]:
    return {**asdict(row), "placement": placement_text(row.placement)}


def verify_json(url: str, report: verify.Report) -> dict[str, Any]:
    """`verify`."""
    return {
        "store": url,
        "job": report.job,
        "entries": report.entries,
        "checkpoints": [commit_json(commit) for commit in report.states],
        "read_bytes": report.read_bytes,
        "findings": [asdict(each) for each in report.findings],
        "unreferenced": [asdict(each) for each in report.unreferenced],
    }


def gc_json(url: str, policy: Policy, report: gc.Report) -> dict[str, Any]:
    """`gc`."""
    return {
        "store": url,
        "dry_run": report.is_dry_run,
        "policy": asdict(policy),
        "retired": report.retired,
        "kept": report.kept,
        "deleted": [
            {"file": each.key, "size_bytes": each.size_bytes, "reason": each.reason}
            for each in report.deleted
        ],
        "deleted_bytes": report.deleted_bytes,
        "foreign": [info.key for info in report.foreign],
    }

"""`keepstep plan`: which layout, what it costs, what failures do to it. Thin: files in, tables out.

Exit status: 0 good, 1 the layout asked about cannot run (or nothing can), 2 the command cannot
mean what was typed.
"""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.planner.calibrate import BOUNDS, CPU_BOUNDS, fit
from keepstep.planner.cluster import Cluster, cluster_from_document, cluster_of
from keepstep.planner.copies import CopyRisk, group_copies, ring_copies
from keepstep.planner.errors import BadCluster, BadModel, BadTable, PlannerError
from keepstep.planner.layouts import Constraints, parse_layout
from keepstep.planner.measured import measured_run
from keepstep.planner.model import ModelConfig, model_from_section, named_models
from keepstep.planner.plan import explain_refusal, make_plan, search
from keepstep.planner.report import (
    calibration_document,
    plan_report,
    survival_report,
    validation_report,
)
from keepstep.planner.survive import RATES_PER_HOST_DAY, Risk
from keepstep.planner.table import read_table
from keepstep.planner.tiers import DEFAULT_TIERS, parse_tier
from keepstep.planner.validate import validate

RUN_DEFAULTS = Path(__file__).parent / "trainer" / "default.toml"
"""Every key of a run's file with its default; a user's file holds only what differs."""

plan_app = typer.Typer(
    add_completion=False,
    help="Plan a run before paying for it: layouts, their traffic and memory, survival.",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
ModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME|CONFIG", help="A known model, or a run's TOML.")
]
VocabOption = Annotated[
    int | None, typer.Option("--vocab-size", help="Where CONFIG leaves it to the corpus.")
]
ClusterOption = Annotated[
    Path | None, typer.Option("--cluster", metavar="FILE", help="A cluster's TOML.")
]


@contextmanager
def _refusals() -> Iterator[None]:
    """What the planner refuses is one line on stderr and exit status 2."""
    try:
        yield
    except (PlannerError, OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        sys.stderr.write(f"keepstep: {' '.join(str(error).split())}\n")
        raise typer.Exit(2) from error


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@plan_app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: ModelOption = "llama3-70b",
    vocab_size: VocabOption = None,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs in all.")] = 1024,
    gpu: Annotated[str, typer.Option("--gpu", help="A100, H100, H200 or B200.")] = "H100",
    cluster: ClusterOption = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", help="Samples per step, of all replicas.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens per sample.")] = None,
    tokens: Annotated[float, typer.Option("--tokens", help="Tokens to train for.")] = 1e12,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="LAYOUT", help="e.g. dp=16,tp=8,pp=8,micro=1")
    ] = None,
    best: Annotated[int, typer.Option("--best", help="How many layouts to show.")] = 10,
    refused: Annotated[
        bool, typer.Option("--refused", help="List every layout that cannot run, and why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the fastest layouts, why the first wins, and what your own would cost."""
    if context.invoked_subcommand:
        return
    with _refusals():
        known, batch = _read_model(model, vocab_size)
        known = replace(known, seq_len=seq_len) if seq_len else known
        machines = _read_cluster(cluster, gpu, gpus)
        if global_batch is None:
            global_batch = batch or 1024
        if global_batch < 1:
            raise PlannerError(f"--global-batch {global_batch}: needs >= 1")
        constraints = Constraints(global_batch)
        costs, found = search(known, machines, constraints)
        plans = [make_plan(costs, one, constraints.global_batch) for one in found.best(best)]
        own = parse_layout(explain) if explain else None
        own_plan = make_plan(costs, own, constraints.global_batch) if own else None
        reason = explain_refusal(costs, own, constraints) if own else None
    report = plan_report(
        costs, constraints, plans, found.refused, tokens, own_plan, reason, all_refused=refused
    )
    if as_json:
        _print_json(report)
    else:
        from keepstep.plan_views import show_plan

        show_plan(report)
    if not plans or reason:
        raise typer.Exit(1)


@plan_app.command("survive")
def survive(
    hosts: Annotated[int, typer.Option("--hosts", help="Hosts in the job.")] = 128,
    rate: Annotated[
        str,
        typer.Option("--rate", help="Failures per 1,000 host-days, or a published run's name."),
    ] = "llama3",
    days: Annotated[float, typer.Option("--days", help="Length of the training.")] = 54.0,
    detect: Annotated[float, typer.Option("--detect", help="Seconds to detect.")] = 5.0,
    restart: Annotated[float, typer.Option("--restart", help="Seconds to restart.")] = 10.0,
    repair: Annotated[float, typer.Option("--repair", help="Hours until a host is back.")] = 4.0,
    spares: Annotated[int, typer.Option("--spares", help="Hosts held ready.")] = 0,
    rigid: Annotated[
        bool, typer.Option("--rigid", help="The job waits while a host is missing.")
    ] = False,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", metavar="NAME=CAPTURE,RESTORE,SURVIVES[,INTERVAL]"),
    ] = None,
    step: Annotated[float, typer.Option("--step", help="Seconds per step.")] = 1.0,
    copies: Annotated[int, typer.Option("--copies", help="Copies in memory.")] = 2,
    placement: Annotated[str, typer.Option("--placement", help="ring or group.")] = "ring",
    again: Annotated[float, typer.Option("--again", help="Seconds to make copies anew.")] = 60.0,
    runs: Annotated[int, typer.Option("--runs", help="Simulated trainings.")] = 64,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say how often to capture, what failures cost, and how safe the copies are."""
    with _refusals():
        risk = Risk(
            hosts=hosts,
            failures_per_host_day=_rate(rate),
            detect_s=detect,
            restart_s=restart,
            repair_s=repair * 3600.0,
            spares=spares,
            elastic=not rigid,
        )
        tiers = [parse_tier(one) for one in tier] if tier else list(DEFAULT_TIERS)
        if placement not in ("ring", "group"):
            raise PlannerError(f"--placement {placement}: must be ring or group")
        place = ring_copies if placement == "ring" else group_copies
        lost = (risk.kinds.host + risk.kinds.several * risk.kinds.at_once) * _rate(rate)
        danger = CopyRisk(host_losses_per_day=lost, again_s=again)
        holders = place(hosts, copies)
        report = survival_report(risk, tiers, days, runs, seed, step, holders, danger)
    if as_json:
        _print_json(report)
    else:
        from keepstep.plan_views import show_survival

        show_survival(report)


@plan_app.command("calibrate")
def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or metrics files.")
    ],
    model: ModelOption,
    vocab_size: VocabOption = None,
    cluster: ClusterOption = None,
    gpu: Annotated[str, typer.Option("--gpu")] = "H100",
    gpus: Annotated[int, typer.Option("--gpus")] = 8,
    skip: Annotated[int, typer.Option("--skip", help="First steps to leave out.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Fit the planner's constants to a few short runs; prints a cluster TOML for --cluster."""
    with _refusals():
        section, rest = _read_config(Path(model), vocab_size)
        known = model_from_section(section, Path(model).stem)
        machines = _read_cluster(cluster, gpu, gpus)
        lines = [(str(path), _metrics_lines(path)) for path in runs]
        found = [measured_run(known, machines, rest, name, text, skip) for name, text in lines]
        fitted = fit(found, CPU_BOUNDS if machines.cores_per_node else BOUNDS)
        document = calibration_document(machines, fitted, found)
    if as_json:
        _print_json(document)
    else:
        from keepstep.plan_views import show_toml

        show_toml(document)


@plan_app.command("validate")
def validate_table(
    table: Annotated[Path, typer.Argument(metavar="CSV", help="Published or measured runs.")],
    rows: Annotated[bool, typer.Option("--rows", help="Also print every row.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Price the runs of a table and say how far off the step times and the order are."""
    with _refusals(), table.open(encoding="utf-8", newline="") as lines:
        try:
            report = validation_report(validate(read_table(lines)), with_rows=rows)
        except csv.Error as error:
            raise BadTable(f"{table}: {error}") from error
    if as_json:
        _print_json(report)
    else:
        from keepstep.plan_views import show_validation

        show_validation(report)


def _rate(text: str) -> float:
    if text in RATES_PER_HOST_DAY:
        return RATES_PER_HOST_DAY[text]
    try:
        rate = float(text) / 1000.0
    except ValueError as error:
        known = ", ".join(RATES_PER_HOST_DAY)
        raise PlannerError(f"--rate {text}: must be a number or one of {known}") from error
    if not rate > 0:
        raise PlannerError(f"--rate {text}: must be more than 0")
    return rate


def _read_model(text: str, vocab_size: int | None) -> tuple[ModelConfig, int | None]:
    """The model, and the global batch of a run's file."""
    models = named_models()
    if text in models:
        return models[text], None
    path = Path(text)
    if not path.is_file():
        raise BadModel(f"--model {text}: neither a file nor one of {', '.join(models)}")
    section, rest = _read_config(path, vocab_size)
    batch = rest.get("batch", {}).get("global_batch")
    return model_from_section(section, path.stem), batch if isinstance(batch, int) else None


def _read_config(
    path: Path, vocab_size: int | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The [model] section of a run's file and its other sections, defaults filled in."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    if not isinstance(document.get("model"), dict):
        raise BadModel(f"{path}: has no [model] section")
    merged: dict[str, dict[str, Any]] = {}
    if RUN_DEFAULTS.is_file():
        with RUN_DEFAULTS.open("rb") as file:
            merged = tomllib.load(file)
    for name, section in document.items():
        merged[name] = {**merged.get(name, {}), **section} if isinstance(section, dict) else {}
    model = merged.pop("model")
    if vocab_size is not None:
        model["vocab_size"] = vocab_size
    if model.get("vocab_size") == 0:
        raise BadModel(f"{path}: vocab_size is 0, that is the corpus's; give it by --vocab-size")
    return model, merged


def _read_cluster(path: Path | None, gpu: str, gpus: int) -> Cluster:
    if path is None:
        return cluster_of(gpu, gpus)
    with path.open("rb") as file:
        try:
            return cluster_from_document(tomllib.load(file), path.stem)
        except BadCluster as error:
            raise BadCluster(f"{path}: {error}") from error


def _metrics_lines(path: Path) -> list[str]:
    file = path / "metrics.jsonl" if path.is_dir() else path
    return file.read_text(encoding="utf-8").splitlines()

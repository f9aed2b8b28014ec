"""`keepstep plan`: which layout, what it costs, what failures do to it. Thin: files in, tables out.

Exit status: 0 good, 1 the layout asked about cannot run (or nothing can), 2 the command cannot
mean what was typed.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keepstep.planner.errors import BadTable, PlannerError
from keepstep.printing import print_json

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
    best: Annotated[int, typer.Option("--best", min=1, help="How many layouts to show.")] = 10,
    refused: Annotated[
        bool, typer.Option("--refused", help="List every layout that cannot run, and why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the fastest layouts, why the first wins, and what your own would cost."""
    if context.invoked_subcommand:
        return
    from keepstep import plan_inputs, plan_views
    from keepstep.planner.layouts import Constraints, parse_layout
    from keepstep.planner.plan import explain_refusal, make_plan, search
    from keepstep.planner.report import plan_report

    with _refusals():
        plan_inputs.positive("--tokens", tokens)
        known, batch = plan_inputs.read_model(model, vocab_size)
        known = known if seq_len is None else replace(known, seq_len=seq_len)
        machines = plan_inputs.read_cluster(cluster, gpu, gpus)
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
        print_json(report)
    else:
        plan_views.show_plan(report)
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
    runs: Annotated[int, typer.Option("--runs", min=1, help="Simulated trainings.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say how often to capture, what failures cost, and how safe the copies are."""
    from keepstep import plan_inputs, plan_views
    from keepstep.planner.copies import CopyRisk, group_copies, ring_copies
    from keepstep.planner.report import survival_report
    from keepstep.planner.survive import Risk
    from keepstep.planner.tiers import DEFAULT_TIERS, parse_tier

    with _refusals():
        for option, number in (("--days", days), ("--step", step), ("--again", again)):
            plan_inputs.positive(option, number)
        risk = Risk(
            hosts=hosts,
            failures_per_host_day=plan_inputs.rate(rate),
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
        lost = (risk.kinds.host + risk.kinds.several * risk.kinds.at_once) * plan_inputs.rate(rate)
        danger = CopyRisk(host_losses_per_day=lost, again_s=again)
        holders = place(hosts, copies)
        report = survival_report(risk, tiers, days, runs, seed, step, holders, danger)
        report["assumed"] = not tier
    if as_json:
        print_json(report)
    else:
        plan_views.show_survival(report)


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
    skip: Annotated[int, typer.Option("--skip", min=0, help="First steps to leave out.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Fit the planner's constants to a few short runs; prints a cluster TOML for --cluster."""
    from keepstep import plan_inputs, plan_views
    from keepstep.planner.calibrate import BOUNDS, CPU_BOUNDS, fit
    from keepstep.planner.measured import measured_run
    from keepstep.planner.model import model_from_section
    from keepstep.planner.report import calibration_document

    with _refusals():
        section, rest = plan_inputs.read_config(Path(model), vocab_size)
        known = model_from_section(section, Path(model).stem)
        machines = plan_inputs.read_cluster(cluster, gpu, gpus)
        lines = [(str(path), plan_inputs.metrics_lines(path)) for path in runs]
        found = [measured_run(known, machines, rest, name, text, skip) for name, text in lines]
        fitted = fit(found, CPU_BOUNDS if machines.cores_per_node else BOUNDS)
        document = calibration_document(machines, fitted, found)
    if as_json:
        print_json(document)
    else:
        plan_views.show_toml(document)


@plan_app.command("validate")
def validate_table(
    table: Annotated[Path, typer.Argument(metavar="CSV", help="Published or measured runs.")],
    rows: Annotated[bool, typer.Option("--rows", help="Also print every row.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Price the runs of a table and say how far off the step times and the order are."""
    from keepstep import plan_views
    from keepstep.planner.report import validation_report
    from keepstep.planner.table import read_table
    from keepstep.planner.validate import validate

    with _refusals(), table.open(encoding="utf-8", newline="") as lines:
        try:
            report = validation_report(validate(read_table(lines)), with_rows=rows)
        except csv.Error as error:
            raise BadTable(f"{table}: {error}") from error
    if as_json:
        print_json(report)
    else:
        plan_views.show_validation(report)

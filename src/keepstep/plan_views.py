"""Tables of the planner's reports, for people."""

from __future__ import annotations

import sys
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Report = dict[str, Any]
WORDS = ("tier", "survives", "layout", "such as", "because", "reason", "source", "model")


def _table(title: str, *columns: str) -> Table:
    """The first column may fold, a number never does."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        words = column in WORDS
        justify: Literal["left", "right"] = "left" if index == 0 or words else "right"
        table.add_column(
            column,
            justify=justify,
            overflow="fold" if words else "ellipsis",
            no_wrap=not (index == 0 or words),
        )
    return table


def _spaced(layout: str) -> str:
    """So that a narrow terminal folds it between its parts."""
    return layout.replace(",", " ")


def _console() -> Console:
    return Console(highlight=False)


def show_plan(report: Report) -> None:
    """The best layouts, why the first wins, the user's own beside it, what cannot run."""
    console = _console()
    model, cluster = report["model"], report["cluster"]
    console.print(
        f"{model['name']} ({model['params'] / 1e9:.1f} B parameters) on {cluster['name']},"
        f" {report['global_batch']} x {model['seq_len']} tokens per step"
    )
    rows = list(report["best"])
    own = report["own"]
    if rows:
        _show_layouts(console, rows, report["tokens"], "Best layouts")
        if report["note"]:
            console.print(report["note"])
        console.print(report["why"])
        tokens = report["tokens_per_replica"]
        console.print(
            f"A replica has {tokens['given']:,} tokens a step; the data axis hides at peak from"
            f" {tokens['to_hide_dp_at_peak']:,.0f}."
        )
        console.print(_traffic_table("Traffic of the first, per GPU and step", rows[0]))
    if own:
        _show_layouts(console, [own, *rows[:1]], report["tokens"], "Yours, and the first")
        console.print(_traffic_table("Traffic of yours, per GPU and step", own))
        if report["own_refusal"]:
            console.print(f"It cannot run: {report['own_refusal']}.")
        elif rows:
            slower = 100.0 * (own["step_s"] / rows[0]["step_s"] - 1.0)
            console.print(f"It takes {slower:.1f} % longer than the first.")
    _show_refusals(console, report)


def _show_layouts(console: Console, rows: list[Report], tokens: float, title: str) -> None:
    days = f"days for {tokens:.3g} tokens"
    table = _table(title, "", "layout", "step s", "MFU %", "GiB/GPU", days, "k$")
    parts = ("compute", "tp", "pp", "dp", "bubble", "optimizer")
    split = _table("Where the seconds go", "", *parts, "HFU %", "tokens/s")
    for number, row in enumerate(rows, start=1):
        table.add_row(
            str(number),
            _spaced(row["layout"]),
            f"{row['step_s']:.3f}",
            f"{100 * row['mfu']:.1f}",
            f"{row['memory_gib']['total']:.1f}",
            f"{row['days']:.1f}",
            f"{row['dollars'] / 1000:,.0f}",
        )
        split.add_row(
            str(number),
            *(f"{row['seconds'][part]:.3f}" for part in parts),
            f"{100 * row['hfu']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
        )
    console.print(table)
    console.print(split)


def _traffic_table(title: str, row: Report) -> Table:
    table = _table(title, "axis", "GB", "wire s", "hides under s", "exposed s", "headroom %")
    for axis, budget in row["traffic"].items():
        headroom = budget["headroom"]
        table.add_row(
            axis,
            f"{budget['bytes_per_gpu'] / 1e9:.3f}",
            f"{budget['wire_s']:.4f}",
            f"{budget['hide_s']:.4f}",
            f"{budget['exposed_s']:.4f}",
            "nothing hides it" if headroom is None else f"{100 * headroom:.0f}",
        )
    return table


def _show_refusals(console: Console, report: Report) -> None:
    if "refused" in report:
        table = _table("Cannot run", "layout", "reason")
        for one in report["refused"]:
            table.add_row(_spaced(one["layout"]), one["reason"])
        console.print(table)
    elif report["refusals"]:
        table = _table("Cannot run (--refused lists all)", "layouts", "such as", "because")
        for one in report["refusals"]:
            table.add_row(str(one["count"]), _spaced(one["example"]), one["reason"])
        console.print(table)


def show_survival(report: Report) -> None:
    """Intervals, the effective time and what takes the rest, spares and copies."""
    console = _console()
    console.print(
        f"{report['hosts']} hosts, {report['failures_per_1000_host_days']:.2f} failures per 1,000"
        f" host-days: one each {report['mtbf_s'] / 3600:.2f} h,"
        f" {report['expected_failures']:.0f} in {report['days']:g} days"
    )
    table = _table(
        "How often to capture",
        "tier",
        "survives",
        "stall s",
        "every s",
        "steps",
        "simulated s",
        "used a day",
        "lost s",
    )
    for tier in report["tiers"]:
        table.add_row(
            tier["name"],
            tier["survives"],
            f"{tier['capture_s']:g}",
            f"{tier['interval_s']:.0f}",
            str(tier["interval_steps"]),
            f"{tier['simulated_interval_s']:.0f}",
            f"{tier['failures_per_day']:.2f}",
            f"{tier['lost_per_failure_s']:.0f}",
        )
    console.print(table)
    if report["assumed"]:
        console.print("The tiers' costs are assumptions; give measured ones with --tier.")
    shares, simulated = report["shares"], report["simulated"]
    console.print(
        f"Effective training time {100 * report['effective']:.2f} % (captures"
        f" {100 * shares['captures']:.2f}, work done again {100 * shares['work_done_again']:.2f},"
        f" recovery {100 * shares['recovery']:.2f}, missing hosts"
        f" {100 * shares['missing_hosts']:.2f})"
    )
    console.print(
        f"Simulated {simulated['runs']} times: {100 * simulated['effective']:.2f} %"
        f" ({100 * simulated['effective_p5']:.2f} to {100 * simulated['effective_p95']:.2f} in 90 %"
        f" of the runs), {simulated['failures']:.0f} failures, {simulated['lost_s'] / 3600:.1f} h"
        f" done again, {simulated['recovering_s'] / 3600:.1f} h recovering"
    )
    console.print(
        f"{report['hosts_under_repair']:.2f} hosts under repair at any moment; spares worth"
        f" holding: {report['spares_worth']}. Chance that all {report['copies']} copies of some"
        f" image in memory die: {100 * report['all_copies_lost_chance']:.3f} %"
    )


def show_validation(report: Report) -> None:
    """Errors over all rows, by source and by group; what was left out."""
    console = _console()
    console.print(
        f"{report['rows']} rows: mean absolute error {report['mape_pct']:.1f} %,"
        f" median {report['median_ape_pct']:.1f} %"
    )
    table = _table("By source", "source", "rows", "mean abs %", "bias %")
    for one in report["sources"]:
        row = (str(one["rows"]), f"{one['mape_pct']:.1f}", f"{one['bias_pct']:+.1f}")
        table.add_row(one["source"], *row)
    console.print(table)
    table = _table("By group", "model", "GPUs", "batch", "rows", "Spearman", "chosen slower by %")
    for group in report["groups"]:
        order = "-" if group["spearman"] is None else f"{group['spearman']:.2f}"
        table.add_row(
            group["model"],
            str(group["gpus"]),
            str(group["global_batch"]),
            str(group["rows"]),
            order,
            f"{group['chosen_slower_pct']:.1f}",
        )
    console.print(table)
    for row in report.get("priced", ()):
        console.print(
            f"row {row['row']}: {row['model']} {row['layout']} measured {row['measured_s']:.3f} s,"
            f" predicted {row['predicted_s']:.3f} ({row['error_pct']:+.1f} %)"
        )
    if report["planner_chose"]:
        chose = ", ".join(f"{key} in {n} rows" for key, n in report["planner_chose"].items())
        console.print(f"Blank cells were the planner's choice: {chose}")
    reasons: dict[str, int] = {}
    for one in report["skipped"]:
        reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    for reason, count in reasons.items():
        console.print(f"left out {count}: {reason}")


def show_toml(document: Report) -> None:
    """A cluster's TOML; the quality of the fit as comments."""
    lines = [f"# fitted to {len(document['fit']['runs'])} runs within"]
    lines[0] += f" {document['fit']['mape_pct']:.1f} % on average"
    lines += [f"# {run}" for run in document["fit"]["runs"]]
    for section in ("cluster", "gpu", "efficiency"):
        lines.append(f"\n[{section}]")
        for key, value in document[section].items():
            text = f'"{value}"' if isinstance(value, str) else repr(value)
            lines.append(f"{key} = {text}")
    sys.stdout.write("\n".join(lines) + "\n")

"""The planner's accuracy on a table of published runs, and how long its searches take.

    python bench/planner.py TABLE.csv [--fit]

`--fit` fits the constants anew on the vTrain rows whose own number is a multiple of four, which is
how the defaults of `Efficiency` were made, and prints the errors on the rest with them.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from keepstep.planner.calibrate import BOUNDS, Measured, fit
from keepstep.planner.choose import Hosts, choose_layout
from keepstep.planner.cluster import Efficiency, cluster_of
from keepstep.planner.layout import Layout
from keepstep.planner.layouts import Constraints
from keepstep.planner.model import named_models
from keepstep.planner.plan import search
from keepstep.planner.table import PublishedRun, read_table
from keepstep.planner.validate import validate


def main() -> None:
    """Print the accuracy table, then the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew")
    arguments = parser.parse_args()
    lines = arguments.table.read_text().splitlines()
    numbers = [
        int(found.group(1)) if (found := re.search(r",row (\d+),", line)) else 0 for line in lines
    ]
    runs = [run for run in read_table(lines) if isinstance(run, PublishedRun)]
    vtrain = [run for run in runs if "vTrain" in run.source]
    fitted = [run for run in vtrain if numbers[run.row - 1] % 4 == 0]
    efficiency = refit(fitted) if arguments.fit else None
    others = [run for run in vtrain if run not in fitted]
    large = [run for run in runs if "Korthikanti" in run.source or "SC'21" in run.source]
    rest = [run for run in runs if run not in vtrain and run not in large]
    print("| rows | n | mean abs error % | median | bias | Spearman by group | chosen slower % |")
    print("|---|---|---|---|---|---|---|")
    show("vTrain, fitted (row % 4 == 0)", fitted, efficiency)
    show("vTrain, the others", others, efficiency)
    show("vTrain, all", vtrain, efficiency)
    show("Korthikanti et al. and SC'21 table 1", large, efficiency)
    for source in sorted({(run.source, run.cluster.gpu.name) for run in rest}):
        some = [run for run in rest if (run.source, run.cluster.gpu.name) == source]
        show(" ".join(source), some, efficiency)
    show_times()


def refit(runs: Sequence[PublishedRun]) -> Efficiency:
    """The constants that fit `runs` best."""
    made = [
        Measured(
            run.model, run.cluster, run.stack, run.layouts[0], run.global_batch, run.step_time_s
        )
        for run in runs
    ]
    found = fit(made).efficiency
    print(", ".join(f"{name} {getattr(found, name):.3f}" for name in BOUNDS), "\n")
    return found


def show(name: str, runs: Sequence[PublishedRun], efficiency: Efficiency | None) -> None:
    """One line of the table."""
    if not runs:
        return
    found = validate(runs, efficiency)
    bias = statistics.fmean(one.error for one in found.priced)
    ordered = [group for group in found.groups if group.spearman is not None]
    ranks = " ".join(f"{group.spearman:.2f}" for group in ordered)
    slower = " ".join(f"{100 * group.slower:.1f}" for group in ordered)
    print(
        f"| {name} | {len(runs)} | {100 * found.mape:.1f} | {100 * found.median_ape:.1f}"
        f" | {100 * bias:+.1f} | {ranks} | {slower} |"
    )


def show_times() -> None:
    """Processor seconds of a full search and of a choice after a loss, on 1,024 GPUs."""
    model, cluster = named_models()["gpt-100b"], cluster_of("H100", 1024)
    before = time.process_time()
    _, found = search(model, cluster, Constraints(1024))
    seconds = time.process_time() - before
    tried = len(found.ranked) + len(found.refused)
    print(f"\nsearch of {model.name} on {cluster.name}: {seconds:.2f} s for {tried} layouts")
    left = Hosts(cluster_of("H100", 1016), tuple(host for host in range(128) if host != 5))
    before = time.process_time()
    choose_layout(model, left, Constraints(1024), Layout(dp_shard=32, tp=4, pp=8))
    print(f"choice after the loss of one host: {1000 * (time.process_time() - before):.0f} ms")


if __name__ == "__main__":
    main()

"""Planner here: fitted to three layouts of the demo model, it orders others as measured."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.kit.proof import print_report

from keepstep.plan_inputs import RUN_DEFAULTS, metrics_lines
from keepstep.planner.calibrate import CPU_BOUNDS, Fit, Measured, fit
from keepstep.planner.cluster import Cluster, cluster_from_document
from keepstep.planner.cost import CostModel
from keepstep.planner.measured import measured_run
from keepstep.planner.model import ModelConfig, model_from_section
from keepstep.planner.validate import spearman
from keepstep.trainer.corpus import standard_library
from keepstep.trainer.metrics import FILE_NAME
from keepstep.trainer.tokenfile import write_token_file
from keepstep.trainer.tokenizer import ByteTokenizer, padded_vocab_size

BAR = 0.8
SKIP = 3
"""First steps of each run that are left out: buffers are made in them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A layout as `keepstep train --layout` takes it, and what else differs from the demo."""

    layout: str
    micro_batch: int = 4
    virtual: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """Options of `keepstep train`."""
        schedule = "1f1b" if self.virtual == 1 else "interleaved1f1b"
        settings = (
            f"batch.micro_batch={self.micro_batch}",
            f"parallel.virtual={self.virtual}",
            f"parallel.schedule={schedule}",
        )
        return "--layout", self.layout, *(part for word in settings for part in ("--set", word))

    def __str__(self) -> str:
        return f"{self.layout},micro={self.micro_batch},virtual={self.virtual}"


CALIBRATE = (
    Case("dp=1,tp=1,pp=1"),
    Case("dp=2,tp=2,pp=2"),
    Case("dp=4,tp=1,pp=1", micro_batch=1),
)
"""The work alone; the demo, with all axes; and many small micro-batches."""

PREDICT = (
    Case("dp=1,tp=1,pp=1", micro_batch=1),
    Case("dp=2,tp=1,pp=1"),
    Case("dp=1,tp=2,pp=1"),
    Case("dp=1,tp=1,pp=4"),
    Case("dp=1,tp=2,pp=4", micro_batch=2),
    Case("dp=8,tp=1,pp=1", micro_batch=2),
    Case("dp=2,tp=2,pp=2", micro_batch=2, virtual=2),
    Case("dp=4,tp=2,pp=1,dp_replicate=2", micro_batch=2),
)


def this_machine() -> Cluster:
    """This machine's cores, shared by all ranks. Rates are nominal: what is reached is fitted."""
    cores = os.cpu_count() or 1
    document: dict[str, object] = {
        "cluster": {
            "nodes": 1,
            "gpus_per_node": 8,
            "nic_bytes_per_s": 1e9,
            "cores_per_node": cores,
        },
        "gpu": {
            "name": "core",
            "peak_flops": 1e11,
            "memory_bytes": 4e9,
            "hbm_bytes_per_s": 1e10,
            "sms": 0,
            "link_bytes_per_s": 1e10,
        },
    }
    return cluster_from_document(document, f"{cores} cores")


def demo_config() -> tuple[ModelConfig, dict[str, Any]]:
    """The demo's model with its corpus's vocabulary, and the other sections of its file."""
    document = tomllib.loads(RUN_DEFAULTS.read_text())
    size = padded_vocab_size(ByteTokenizer().info.vocab_size, document["data"]["vocab_multiple"])
    return model_from_section({**document.pop("model"), "vocab_size": size}, "demo"), document


def train(run_dir: Path, corpus: Path, case: Case, steps: int, seed: int) -> None:
    """Run `keepstep train` once, unless that was done before. RuntimeError with its words."""
    if (run_dir / FILE_NAME).is_file():
        return
    command = [sys.executable, "-m", "keepstep.cli", "train", "--run-dir", str(run_dir)]
    command += ["--steps", str(steps), "--checkpoint-every", "0", *case.words]
    for word in (f"data.path={corpus}", f"run.seed={seed}", "run.evaluate_every=0"):
        command += ["--set", word]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{case} ended with {done.returncode}: {done.stderr[-2000:]}")


def measure(
    directory: Path, cases: Sequence[Case], steps: int, rounds: int, seed: int
) -> dict[Case, Measured]:
    """Run each case `rounds` times, all of them in turn, and take the median of all their steps."""
    corpus = directory / "corpus"
    if not corpus.with_suffix(".bin").is_file():
        write_token_file(corpus, ByteTokenizer(), standard_library(400_000))
    run_dirs = {case: [directory / f"{case}-{n}" for n in range(rounds)] for case in cases}
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            train(run_dirs[case][number], corpus, case, steps, seed)
    model, config = demo_config()
    machine = this_machine()
    found = {}
    for case, runs in run_dirs.items():
        own = {
            **config,
            "batch": {**config["batch"], "micro_batch": case.micro_batch},
            "parallel": {**config["parallel"], "virtual": case.virtual},
        }
        lines = [line for run in runs for line in metrics_lines(run)[SKIP:]]
        found[case] = measured_run(model, machine, own, str(case), lines, skip=0)
    return found


def predict(run: Measured, fitted: Fit) -> float:
    """Seconds of a step that the fitted planner expects of a run's layout."""
    cluster = replace(run.cluster, efficiency=fitted.efficiency)
    return CostModel(run.model, cluster, run.stack).step(run.layout, run.global_batch).total_s


def pairs(runs: Sequence[Measured], fitted: Fit) -> list[dict[str, object]]:
    """Each layout with its measured and its predicted milliseconds."""
    return [
        {
            "layout": str(run.layout),
            "ranks": run.layout.gpus,
            "measured_ms": round(1e3 * run.seconds, 1),
            "predicted_ms": round(1e3 * predict(run, fitted), 1),
        }
        for run in runs
    ]


@contextlib.contextmanager
def directory_for(kept: Path | None) -> Iterator[Path]:
    """The directory that was asked for, or one that is gone afterwards."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="keepstep-calibration-") as name:
            yield Path(name)
    else:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()


def main(arguments: list[str]) -> int:
    """Measure, fit, predict; 1 if the order is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each layout")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and take those found here")
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    with directory_for(options.runs) as directory:
        cases = (*CALIBRATE, *PREDICT)
        measured = measure(directory, cases, options.steps, options.rounds, options.seed)
    given = [measured[case] for case in CALIBRATE]
    others = [measured[case] for case in PREDICT]
    fitted = fit(given, CPU_BOUNDS)
    expected = [predict(run, fitted) for run in others]
    order = spearman(expected, [run.seconds for run in others])
    errors = [abs(p / run.seconds - 1.0) for p, run in zip(expected, others, strict=True)]
    print_report(
        "calibration",
        options.seed,
        {
            "cores": os.cpu_count(),
            "steps_per_layout": options.rounds * (options.steps - SKIP),
            "bar": BAR,
            "spearman": order,
            "mean_error_pct": round(100.0 * sum(errors) / len(errors), 1),
            "calibrated_from": pairs(given, fitted),
            "fit_error_pct": round(100.0 * fitted.mape, 1),
            "constants": {name: getattr(fitted.efficiency, name) for name in CPU_BOUNDS},
            "predicted": pairs(others, fitted),
            "seconds": round(time.monotonic() - begun_s, 1),
        },
    )
    return 0 if order is not None and order >= BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

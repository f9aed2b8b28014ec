"""Parity: every layout against one process, fp32 and fp64, and every mutation seen to break it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace

from tests.kit.mutations import GUARDS
from tests.kit.parity import (
    BARS,
    CASES,
    Case,
    ParityBroken,
    check_parity,
    distributed,
    errors,
    reference,
)
from tests.kit.proof import print_report


def measure(cases: list[Case], dtype: str, steps: int) -> tuple[dict[str, object], list[str]]:
    """The errors of each case with their worst, and sentences for those above their bar."""
    found: dict[str, dict[str, float]] = {}
    broken: list[str] = []
    for case in cases:
        found[case.name] = errors(distributed(case, dtype, steps), reference(case, dtype, steps))
        print(f"{dtype} {case.name}: {found[case.name]}", file=sys.stderr, flush=True)
        for what, bar in asdict(BARS[dtype]).items():
            if not found[case.name][what] <= bar:
                broken.append(f"{case.name} {dtype}: {what} {found[case.name][what]:.2g} > {bar}")
    worst = {
        what: max((errs[what], name) for name, errs in found.items())
        for what in asdict(BARS[dtype])
    }
    return {"bars": asdict(BARS[dtype]), "worst": worst, "cases": found}, broken


def survivors(seed: int) -> list[str]:
    """The mutations after which parity still holds: there must be none."""
    left = []
    for name, removed in GUARDS:
        try:
            check_parity(replace(CASES[name], seed=seed), "fp32", 1, removed)
        except ParityBroken as broken:
            print(f"without {removed}: {broken}", file=sys.stderr, flush=True)
        else:
            left.append(f"{name} holds without {removed}")
    return left


def main() -> int:
    """Print the report as JSON; 0 if all bars hold and no mutation survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    cases = [replace(CASES[name], seed=options.seed) for name in options.cases]
    figures: dict[str, object] = {}
    failures: list[str] = []
    for dtype in ("fp32", "fp64"):
        figures[dtype], broken = measure(cases, dtype, options.steps)
        failures += broken
    failures += survivors(options.seed)
    figures["mutations"] = len(GUARDS)
    figures["failures"] = failures
    print_report("parity", options.seed, figures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

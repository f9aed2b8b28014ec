"""Rank, keeper and committer sleep through a change of generation, wake, and change nothing."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.kit.proof import print_report
from tests.kit.zombies import CASES, run_case


def main(arguments: list[str]) -> int:
    """Run all cases; 1 if any changed anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="so many times each case")
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    cases: dict[str, dict[str, object]] = {}
    wrong: list[str] = []
    for _ in range(options.rounds):
        for case, commits in itertools.product(CASES, (False, True)):
            with tempfile.TemporaryDirectory(prefix="keepstep-zombies-") as directory:
                outcome = run_case(Path(directory), case, commits=commits)
            name = f"{case.name}, {'after' if commits else 'before'} a commit of the newer"
            wrong += [f"{name}: {one}" for one in outcome.wrong]
            cases[name] = {
                "entries": len(outcome.after.log),
                "referred_files": len(outcome.after.referred),
                "held_images": len(outcome.after.held),
                "base": [outcome.base.generation, outcome.base.step],
                "landed_late": outcome.landed,
                "zombie": list(outcome.zombie_said),
            }
    print_report(
        "zombies",
        0,
        {
            "rounds": options.rounds,
            "cases": cases,
            "wrong": wrong,
            "seconds": round(time.monotonic() - begun_s, 1),
        },
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

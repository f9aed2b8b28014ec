"""Reshard, A -> B -> A: random states and layouts against arange and a naive second reader."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, seed, settings
from tests.kit.make_store import Content, arange, mesh, split
from tests.kit.proof import print_report
from tests.kit.reshards import ODD_ROWS, check_reshard, contents, layouts

from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.layout import Layout
from keepstep.ckpt.placement import mesh_size
from keepstep.storage.errors import StoreError

FAULTS = (AssertionError, CheckpointError, StoreError, ValueError, LookupError)


@dataclass(slots=True)
class Figures:
    """What was resharded, and what was found wrong with it."""

    reshards: int = 0
    tensors: int = 0
    traits: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, content: Content) -> None:
        """Count one more state, and what is odd about its tensors."""
        self.reshards += 1
        self.tensors += len(content.tensors)
        for name, array in content.tensors.items():
            dims = [cut.dim for cut in content.placements[name].splits]
            self.traits["0-d"] += array.ndim == 0
            self.traits["empty"] += array.size == 0
            self.traits["strided (one dim cut twice)"] += len(dims) > len(set(dims))
            self.traits["pinned"] += bool(content.placements[name].at)
            self.traits[f"dtype {content.dtypes[name]}"] += 1


def random_states(figures: Figures, number: int, examples: int) -> None:
    """`examples` random states into random layouts; the draws follow from the seed `number`."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        report_multiple_bugs=False,
    )
    @given(contents(), layouts)
    def check(content: Content, layout: Layout) -> None:
        figures.add(content)
        check_reshard(content, layout)

    try:
        check()
    except FAULTS:
        figures.wrong.append(f"seed {number}: {traceback.format_exc(limit=-2)}")


def odd_rows(figures: Figures, ranks_max: int = 12) -> None:
    """7 and 13 rows over tp 2 x dp 3, in every dtype, into every layout of so many ranks."""
    sizes = range(1, ranks_max + 1)
    targets = [
        Layout(dp, tp, pp) for dp in sizes for tp in sizes for pp in sizes if dp * tp * pp in sizes
    ]
    strided = split("tp:0", "dp_shard:0")
    grid = mesh(pp=1, dp_replicate=1, dp_shard=3, tp=2)
    assert mesh_size(grid) == 6
    for number, target in enumerate(targets):
        dtypes = sorted(DTYPES)[number % 2 :: 2]
        content = Content({}, grid)
        for dtype in dtypes:
            for rows in ODD_ROWS:
                name = f"{dtype}/{rows}"
                content.tensors[name] = arange((rows, 3), dtype)
                content.dtypes[name], content.placements[name] = dtype, strided
        figures.add(content)
        try:
            check_reshard(content, target)
        except FAULTS as error:
            figures.wrong.append(f"odd rows into {target}: {type(error).__name__}: {error}")


def main(arguments: list[str]) -> int:
    """Run it whole; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5, help="so many seeds, from --seed on")
    parser.add_argument("--examples", type=int, default=400, help="random states for each seed")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    figures = Figures()
    odd_rows(figures)
    for number in range(options.seed, options.seed + options.runs):
        random_states(figures, number, options.examples)
    print_report(
        "reshard",
        options.seed,
        {
            "runs": options.runs,
            "reshards": figures.reshards,
            "tensors": figures.tensors,
            "of_them": dict(sorted(figures.traits.items())),
            "wrong": len(figures.wrong),
            "first_wrong": figures.wrong[:5],
            "seconds": round(time.monotonic() - begun, 1),
        },
    )
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`keepstep clean`: what dead jobs left on this host, listed; with `--yes` freed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keepstep.ckpt.clean import Leftover, find_leftovers, free
from keepstep.ckpt.hostdir import default_shm_dir, shm_dirs_of_runs
from keepstep.printing import print_json


def clean(
    yes: Annotated[
        bool, typer.Option("--yes", help="Free what is dead; without it nothing is changed.")
    ] = False,
    shm_dir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Of pools; may repeat. Default: /dev/shm/keepstep-UID*.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """List what dead jobs of this user left in this host's memory and temporary directory.

    A job's memory may hold its newest states, from which a run could still go on: look at the list
    first. What a living keeper, rank or launcher uses is never touched.
    """
    places = [place for one in shm_dir or [default_shm_dir()] for place in shm_dirs_of_runs(one)]
    found = find_leftovers(places, [Path(tempfile.gettempdir())])
    outcomes = [_outcome(leftover, is_freed=yes) for leftover in found]
    if as_json:
        print_json([_as_json(*pair) for pair in zip(found, outcomes, strict=True)])
    else:
        _print(found, outcomes, is_freed=yes)
    if any(outcome.startswith("failed") for outcome in outcomes):
        raise typer.Exit(1)


def _outcome(leftover: Leftover, is_freed: bool) -> str:
    """What became of it: "dead", "freed", or "stays: ..." or "failed: ..." with the reason."""
    if leftover.in_use:
        return f"stays: {leftover.in_use}"
    if not is_freed:
        return "dead"
    try:
        reason = free(leftover)
    except OSError as error:
        return f"failed: {error}"
    return f"stays: {reason}" if reason else "freed"


def _as_json(leftover: Leftover, outcome: str) -> dict[str, object]:
    newest = leftover.newest
    return {
        "path": str(leftover.path),
        "kind": leftover.kind.name.lower(),
        "size_bytes": leftover.size_bytes,
        "idle_s": round(leftover.idle_s, 1),
        "newest": newest and {"generation": newest.generation, "step": newest.step},
        "outcome": outcome.partition(":")[0],
        "reason": outcome.partition(": ")[2],
    }


def _print(found: list[Leftover], outcomes: list[str], is_freed: bool) -> None:
    from keepstep.ckpt.sizes import size_text
    from keepstep.views import age_text

    if not found:
        sys.stdout.write("nothing is left by any job of this user on this host\n")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("directory", "size", "idle", "newest", "outcome"):
        table.add_column(name, overflow="fold", justify="right" if name == "size" else "left")
    for leftover, outcome in zip(found, outcomes, strict=True):
        newest = leftover.newest
        table.add_row(
            escape(str(leftover.path)),
            size_text(leftover.size_bytes),
            age_text(leftover.idle_s),
            f"step {newest.step} of generation {newest.generation}" if newest else "",
            escape(outcome),
        )
    Console().print(table)
    dead = [one for one, outcome in zip(found, outcomes, strict=True) if outcome == "dead"]
    if dead and not is_freed:
        total = size_text(sum(leftover.size_bytes for leftover in dead))
        sys.stdout.write(
            f"\n{len(dead)} of {len(found)} are dead and hold {total}; `keepstep clean --yes` "
            "frees them, with the states in them\n"
        )

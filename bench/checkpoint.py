"""Captures, commits and restores against torch's checkpointing and the limits of the machine.

    python -m bench.checkpoint                 4 gloo ranks x 256 MB of FSDP2 + Adam, medians of 5
    python -m bench.checkpoint --mb 16 --repetitions 1      a quick trial
    python -m bench.checkpoint --only durable,commit        some parts alone

Parts: durable, commit, call, restore (one set of ranks); reshard (another); replication, small and
plan (one process each). Every round runs everything once, in turning order, so that the machine's
drift hits all alike; ratios are medians of the ratios within a round. Ranks are timed from a
barrier to the last one's end.

`durable` is from the moment the first image was sealed until all are on the disk, durably. `commit`
is from before `capture()` until all ranks know of the commit in the log, for states that are due in
the store alone: a directory on the same disk; the disk tier has no part in it. `raw` is the best of
1 to 4 O_DIRECT streams of as many bytes, with fsync. Restores are of files that were read once
before, verified, and agreed on by all ranks. Prints JSON; leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.measures.model import Trained
from bench.measures.others import TorchCheckpointing
from bench.measures.planning import planning
from bench.measures.rank import Site, keeper_site
from bench.measures.replication import replication
from bench.measures.saves import CALL, COMMIT, DURABLE, PARTS, RESTORE, Reshards, Round, Saves
from bench.measures.small import small_cost
from tests.kit.proof import ROOT, git_commit
from torch import distributed as dist

RESHARD, REPLICATION, SMALL, PLAN = "reshard", "replication", "small", "plan"
ALL_PARTS = (*PARTS, RESHARD, REPLICATION, SMALL, PLAN)
RESHARD_FROM = (2, 2)
RESHARD_TO = {"4x1": (4, 1), "1x4": (1, 4)}
PR_SET_PDEATHSIG = 1
TIMEOUT_S = 1800.0
MILLION = 1e6


@dataclass(frozen=True)
class Options:
    """What to measure."""

    ranks: int
    mb: int
    repetitions: int
    seed: int
    directory: str
    only: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The wanted parts, in the order in which they run."""
        wanted = self.only.split(",") if self.only else list(ALL_PARTS)
        unknown = [part for part in wanted if part not in ALL_PARTS]
        if unknown:
            raise SystemExit(f"--only {','.join(unknown)}: expected some of {','.join(ALL_PARTS)}")
        if RESHARD in wanted and self.ranks != RESHARD_FROM[0] * RESHARD_FROM[1]:
            raise SystemExit(f"--ranks {self.ranks}: {RESHARD} is of 4 ranks; give --only others")
        return tuple(part for part in ALL_PARTS if part in wanted)

    @property
    def total_bytes(self) -> int:
        """Of the state, all ranks together."""
        return self.ranks * self.mb * 2**20


# What ranks do.


def rank_main(options: Options, rank: int, group: str, root: Path, site: Site) -> None:
    """One rank of one set. Rank 0 writes what was found."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the bench
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    with contextlib.ExitStack() as stack:
        measure = _measure_reshard if group == RESHARD else _measure_saves
        found = measure(options, rank, root, site, stack)
        dist.barrier()
    if rank == 0:
        (root / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure_saves(
    options: Options, rank: int, root: Path, site: Site, stack: contextlib.ExitStack
) -> dict[str, Any]:
    trained = Trained(options.ranks, 1, options.total_bytes, options.seed)
    saves = Saves(trained, rank, options.ranks, site, root, stack)
    rounds = saves.rounds(options.parts, options.repetitions)
    return {
        "bytes_per_rank": trained.bytes_per_rank,
        "inside_bytes": saves.ours.inside_bytes,
        "rounds": rounds,
    }


def _measure_reshard(
    options: Options, rank: int, root: Path, site: Site, stack: contextlib.ExitStack
) -> dict[str, Any]:
    source = Trained(*RESHARD_FROM, options.total_bytes, options.seed)
    others = {
        name: Trained(*sizes, options.total_bytes, options.seed + 1)
        for name, sizes in RESHARD_TO.items()
    }
    reshards = Reshards(source, others, rank, site, root, stack)
    rounds = reshards.rounds(options.repetitions)
    return {"bytes_per_rank": source.bytes_per_rank, "rounds": rounds}


def run_ranks(options: Options, group: str, root: Path) -> dict[str, Any]:
    """Start a set of ranks with a keeper of their own, wait for them, and read what they found."""
    place = root / group
    place.mkdir()
    with keeper_site(place) as (site, _):
        command = [
            sys.executable,
            *("-m", "bench.checkpoint", "--group", group, "--root", str(place)),
            *("--site", json.dumps(asdict_of(site)), *arguments_of(options)),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=ROOT)
            for rank in range(options.ranks)
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"{group}: ranks ended with exit codes {codes}")
    found: dict[str, Any] = json.loads((place / "found.json").read_text())
    return found


def asdict_of(site: Site) -> dict[str, str]:
    return {"host_dir": site.host_dir, "store": site.store, "disk": site.disk}


# What it comes to.


class Report:
    """Figures, ratios and bars, part by part."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bars: dict[str, list[Any]] = {}
        self.found: dict[str, Any] = {}

    def at_least(self, name: str, value: float, bar: float) -> None:
        """A bar: `value` >= `bar`."""
        self.bars[name] = [value, ">=", bar, value >= bar]

    def at_most(self, name: str, value: float, bar: float) -> None:
        """A bar: `value` <= `bar`."""
        self.bars[name] = [value, "<=", bar, value <= bar]

    def add_saves(self, found: dict[str, Any]) -> None:
        """The set of ranks in one layout."""
        rounds: list[Round] = found["rounds"]
        parts = self.options.parts
        total_bytes = found["bytes_per_rank"] * self.options.ranks
        seconds, rates = _medians(rounds, total_bytes)
        self.found["saves"] = {
            "bytes_per_rank": found["bytes_per_rank"],
            "copied_in_the_call_bytes": found["inside_bytes"],
            "seconds": seconds,
            "gb_per_s": rates,
            "rounds": rounds,
        }
        if DURABLE in parts:
            self.at_least("durable_of_raw", _ratio(rounds, "raw", "sealed_to_disk"), 0.8)
        if COMMIT in parts:
            self.at_least("commit_of_raw", _ratio(rounds, "raw", "captured_to_commit"), 0.65)
            self.at_least("commit_vs_dcp", _ratio(rounds, "dcp_save", "captured_to_commit"), 2.0)
        if CALL in parts:
            share = found["inside_bytes"] / found["bytes_per_rank"]
            beyond_ms = [(one["call"] - share * one["memcpy"]) * 1e3 for one in rounds]
            self.at_most("call_beyond_its_copy_ms", statistics.median(beyond_ms), 2.0)
            self.at_most("guard_of_memcpy", _ratio(rounds, "guard", "memcpy"), 1.2)
            for name in ("dcp_async", "dcp_staged", "torch_checkpointing"):
                blocked = f"{name}_blocked"
                if blocked in rounds[0]:
                    self.found[f"{blocked}_vs_guard"] = _ratio(rounds, blocked, "guard")
            self.found["torch_checkpointing"] = TorchCheckpointing.why_not() or "measured"
        if RESTORE in parts:
            memory = _ratio(rounds, "memcpy_restored", "restore_memory")
            self.at_least("restore_memory_of_memcpy", memory, 0.5)
            self.at_least("restore_disk_vs_dcp", _ratio(rounds, "dcp_load", "restore_disk"), 2.5)

    def add_reshard(self, found: dict[str, Any]) -> None:
        """The set of ranks that load in another layout."""
        rounds: list[Round] = found["rounds"]
        seconds, rates = _medians(rounds, found["bytes_per_rank"] * self.options.ranks)
        self.found[RESHARD] = {"seconds": seconds, "gb_per_s": rates, "rounds": rounds}
        for name in RESHARD_TO:
            ratio = _ratio(rounds, f"dcp_reshard_{name}", f"reshard_{name}")
            self.at_least(f"reshard_2x2_to_{name}_vs_dcp", ratio, 2.5)

    def add_replication(self, found: dict[str, Any]) -> None:
        """Two hosts."""
        self.found[REPLICATION] = found
        self.at_least("replication_of_stream", found["of_stream"], 0.7)

    def add_small(self, found: dict[str, Any]) -> None:
        """Many small tensors."""
        self.found[SMALL] = found
        self.at_most("small_ms", found["ours_ms"], 0.02)
        self.at_most("small_bytes", found["ours_bytes"], 250)

    def add_plan(self, found: dict[str, Any]) -> None:
        """The plan of one of many ranks."""
        self.found[PLAN] = found
        self.at_most("plan_s", found["plan_s"], 1.0)
        self.at_most("manifest_mb", found["manifest_bytes"] / MILLION, 16.0)

    def json(self) -> dict[str, Any]:
        """All of it."""
        given = asdict(self.options)
        given.pop("directory")
        return {
            "bench": "checkpoint",
            "options": given,
            "git": git_commit(),
            "torch": torch.__version__,
            "cpus": len(os.sched_getaffinity(0)),
            **self.found,
            "bars": self.bars,
            "passed": all(bar[-1] for bar in self.bars.values()),
        }


def _medians(rounds: list[Round], total_bytes: int) -> tuple[Round, Round]:
    seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    rates = {name: total_bytes / 1e9 / one for name, one in seconds.items() if name != "call"}
    return seconds, rates


def _ratio(rounds: list[Round], above: str, below: str) -> float:
    return statistics.median(one[above] / one[below] for one in rounds)


def run_all(options: Options) -> dict[str, Any]:
    """All wanted parts; all files are removed in any case."""
    parts, report = options.parts, Report(options)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs the cleanup
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.directory) as text:
        root = Path(text).resolve()
        if set(parts) & set(PARTS):
            report.add_saves(run_ranks(options, "saves", root))
        if RESHARD in parts:
            report.add_reshard(run_ranks(options, RESHARD, root))
        if REPLICATION in parts:
            place = root / REPLICATION
            place.mkdir()
            found = replication(place, options.mb * 2**20, options.repetitions)
            report.add_replication(found)
        if SMALL in parts:
            place = root / SMALL
            place.mkdir()
            report.add_small(small_cost(place, options.repetitions))
        if PLAN in parts:
            report.add_plan(planning(options.repetitions))
    return report.json()


def arguments_of(options: Options) -> list[str]:
    """The command line that says the same."""
    return [word for key, value in asdict(options).items() for word in (f"--{key}", str(value))]


def main() -> int:
    """Measure; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=256, help="MiB of state a rank")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=".", help="where files go; on a disk, not tmpfs")
    parser.add_argument("--only", default="", help=f"some of {','.join(ALL_PARTS)}")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--site", default="", help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    rank, group, root, site = (given.pop(name) for name in ("rank", "group", "root", "site"))
    options = Options(**given)
    warnings.filterwarnings("ignore", module="torch")
    if rank is not None:
        rank_main(options, rank, group, root, Site(**json.loads(site)))
        return 0
    found = run_all(options)
    print(json.dumps(found, indent=1))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

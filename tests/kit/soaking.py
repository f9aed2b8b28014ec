"""The soak's parent: two hosts, four ranks, and who is killed when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.begins import Site
from tests.kit.keepers import TOKEN, KeeperHost, keeper_host
from tests.kit.slow_network import HERE, SHOWN, free_ports, slow_network
from tests.kit.soak_rank import SIZES, Board, Post, Status, Word, fork_rank

from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_errors import KeeperGone
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.slots import STEP_NONE
from keepstep.ckpt.tiers import TierPolicy, Tiers
from keepstep.storage.locate import open_store
from keepstep.storage.token import Token

RANKS = SIZES[0] * SIZES[1]
HOSTS = ("h0", "h0", "h1", "h1")
NAMES = ("h0", "h1")
DELAY_MAX_S = 0.12
CUT = 0.02
EARLY = 0.2
"""Of the kills, those that come before all ranks have begun."""

LATER_MAX_S = 0.5
WAIT_S = 300.0
PATIENCE_S = 300.0
SAMPLES_MIN = 40
KEEPER_WARM_UP = 8
"""Kills that a keeper survives before its memory is compared."""

_POLL_S = 0.002


@dataclass(frozen=True)
class Sample:
    """What there is after a kill, when the dead are buried and keepers are back.

    Attributes:
        fds, rss_bytes: of the parent; the latter without shared memory.
        keepers: by pid, the same of each keeper.
        shared_bytes: of shared memory, as files have it.
        files: everywhere, by name; of the log no single entries.
    """

    fds: int
    rss_bytes: int
    keepers: dict[int, tuple[int, int]]
    shared_bytes: int
    files: frozenset[str]


@dataclass
class Found:
    """What has come of it so far."""

    wrong: list[Any] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    restores: int = 0
    steps_captured: int = 0
    steps_skipped: int = 0
    copies_failed: int = 0
    samples: list[Sample] = field(default_factory=list)


class Soak:
    """One soak.

    Args:
        directory: for everything that is not shared memory.
        seed: of all that is random here.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._random = random.Random(seed)
        self._board = Board(RANKS)
        self._stack = contextlib.ExitStack()
        self._shm_dir = Path(tempfile.mkdtemp(prefix="keepstep-soak-", dir="/dev/shm"))
        self._ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
        self._keepers: dict[str, KeeperHost] = {}
        self._ranks: dict[int, int] = {}
        self._expected: State | None = None
        self._generation = 0
        self.found = Found()

    def __enter__(self) -> Soak:
        self._stack.enter_context(
            slow_network(list(self._ports.values()), self._seed, DELAY_MAX_S, CUT)
        )
        tiers = Tiers(peers=1, disk=TierPolicy(), store=TierPolicy())
        for name in NAMES:
            self._keepers[name] = self._stack.enter_context(
                keeper_host(
                    self._directory,
                    name,
                    shm_dir=str(self._shm_dir),
                    tiers=tiers,
                    patience_s=PATIENCE_S,
                    port=self._ports[name],
                    bind=HERE,
                    advertise=SHOWN,
                )
            )
            self._keepers[name].start()
        self._post = Post(
            site=Site(
                store=str(self._directory / "store"),
                hosts=HOSTS,
                host_dirs={name: str(each.place.path) for name, each in self._keepers.items()},
            ),
            board=self._board,
            rendezvous=self._directory / "rendezvous",
            output=self._directory / "ranks.log",
            seed=self._seed,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_ranks()
        self._stack.close()
        for file in sorted(self._shm_dir.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        with contextlib.suppress(FileNotFoundError):  # a keeper that ends removes an empty one
            self._shm_dir.rmdir()

    def round(self, number: int, total: int) -> None:
        """A generation that begins, and ends by a kill; then what is left is looked at."""
        if self.found.wrong:
            return
        self._fork()
        is_early = self._expected is not None and self._random.random() < EARLY
        if is_early:
            time.sleep(self._random.uniform(0.0, 1.0))
        else:
            self._wait_stepping()
            time.sleep(self._random.uniform(0.0, LATER_MAX_S))
        self._kill(number, total, is_early=is_early)
        self._end_ranks()
        if not self.found.wrong:
            self._look(number)
            self._sample()

    def finish(self) -> None:
        """One generation more, which nobody kills before it has the last state."""
        if not self.found.wrong:
            self._fork()
            self._wait_stepping()
            self._end_ranks()

    # Killing.

    def _fork(self) -> None:
        tasks = os.listdir("/proc/self/task")
        assert len(tasks) == 1, f"{len(tasks)} threads: a fork would copy one of them alone"
        self._board.clear()
        self._post.rendezvous.unlink(missing_ok=True)
        self._ranks = {rank: fork_rank(rank, self._post) for rank in range(RANKS)}

    def _kill(self, number: int, total: int, *, is_early: bool) -> None:
        kind = self._random.choice(("rank", "rank", "keeper", "both"))
        host = self._spared(number, total) or self._random.choice(NAMES)
        ranks = self._random.sample(range(RANKS), self._random.randint(1, RANKS))
        self.found.kinds[f"{kind}{', early' if is_early else ''}"] += 1
        victims = [] if kind == "keeper" else [self._ranks[rank] for rank in ranks]
        if kind != "rank":
            victims.insert(self._random.randint(0, len(victims)), self._keeper_pid(host))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if kind == "rank":
            return
        if kind == "keeper" and not is_early and self._random.random() < 0.5:
            self.found.kinds["keeper, ranks went on"] += 1
            before = min(self._board.get(rank, Word.AGREED) for rank in range(RANKS))
            self._revive(host)
            self._wait(lambda: self._agreed() > before + 2, "ranks go on with the new keeper")
            return
        self._end_ranks()
        self._revive(host)

    def _spared(self, number: int, total: int) -> str:
        """Whose keeper alone is killed: so that the other's lives long, in its quarter."""
        return ("", NAMES[0], NAMES[1], "")[min(4 * number // total, 3)]

    def _revive(self, host: str) -> None:
        keeper = self._keepers[host]
        last = keeper.last
        assert last is not None
        last.wait(WAIT_S)
        keeper.started.clear()
        keeper.start()
        self._wait(lambda: self._serves(host), f"the keeper of {host} serves others")

    def _keeper_pid(self, host: str) -> int:
        last = self._keepers[host].last
        assert last is not None
        return last.pid

    def _end_ranks(self) -> None:
        for pid in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._ranks.values():
            os.waitpid(pid, 0)
        self._count_steps()
        self._ranks = {}

    def _count_steps(self) -> None:
        if self._ranks:
            board = self._board
            self.found.steps_captured += board.get(0, Word.CAPTURED)
            self.found.steps_skipped += board.get(0, Word.SKIPPED)
            self.found.copies_failed += sum(
                board.get(rank, Word.FAILED_COPIES) for rank in range(RANKS)
            )

    # Looking.

    def _wait_stepping(self) -> None:
        """Until all ranks have begun, from what they should, and a state is safe everywhere."""
        board = self._board

        def is_stepping() -> bool:
            statuses = {board.get(rank, Word.STATUS) for rank in range(RANKS)}
            if Status.WRONG in statuses:
                return True
            return statuses == {Status.BEGUN} and self._agreed() > board.get(0, Word.BASE_STEP)

        self._wait(is_stepping, "all ranks step")
        self._check_begun()

    def _check_begun(self) -> None:
        """What all ranks that have begun got."""
        board = self._board
        bases = set()
        for rank in range(RANKS):
            status = board.get(rank, Word.STATUS)
            if status == Status.WRONG:
                self._blame(f"rank {rank} did not get the bits of the reference")
            if status == Status.BEGUN:
                bases.add(
                    State(board.get(rank, Word.BASE_GENERATION), board.get(rank, Word.BASE_STEP))
                )
                self._generation = board.get(rank, Word.GENERATION)
                self.found.restores += 1
        if len(bases) > 1:
            self._blame(f"ranks began from different states: {sorted(bases)}")
        expected = self._expected
        if expected is not None and any(base < expected for base in bases):
            self._blame(f"began from {bases}, but {expected} was there")

    def _look(self, number: int) -> None:
        """Find the newest state that all ranks have, and see that none was lost."""
        self._check_begun()
        deadline_s = time.monotonic() + WAIT_S
        floor = self._floor()
        while True:
            try:
                newest = self._newest()
            except KeeperGone as error:
                self._blame(f"kill {number}: {error}")
                return
            if floor is None or (newest is not None and newest >= floor):
                break
            if time.monotonic() > deadline_s:
                self._blame(f"kill {number}: expected {floor} or newer, found {newest}")
                return
            time.sleep(_POLL_S)
        self._expected = newest

    def _floor(self) -> State | None:
        """The newest state of which it is known that it was safe on all ranks."""
        agreed = max(self._board.get(rank, Word.AGREED) for rank in range(RANKS))
        if self._generation and agreed > STEP_NONE:
            here = State(self._generation, agreed)
            if self._board.get(0, Word.GENERATION) == self._generation:
                return here if self._expected is None else max(here, self._expected)
        return self._expected

    def _newest(self) -> State | None:
        """Of the states on the lineage, the newest of which there are images of all ranks."""
        lineage = Log(open_store(str(self._directory / "store"))).read()
        ranks: dict[State, set[int]] = {}
        for name in NAMES:
            for copy in self._inventory(name).copies:
                ranks.setdefault(copy.state, set()).add(copy.record.rank)
        whole = [state for state, held in ranks.items() if held == set(range(RANKS))]
        return max((state for state in whole if not lineage.admits(state)), default=None)

    def _inventory(self, name: str) -> Inventory:
        client = PlaneClient(f"{HERE}:{self._ports[name]}", Token(TOKEN), PATIENCE_S)
        with contextlib.closing(client):
            return client.inventory()

    def _serves(self, name: str) -> bool:
        try:
            self._inventory(name)
        except KeeperGone:
            return False
        return True

    def _agreed(self) -> int:
        return min(self._board.get(rank, Word.AGREED) for rank in range(RANKS))

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > deadline_s:
                self._blame(f"not so after {WAIT_S:.0f} s: {what}")
                return
            time.sleep(_POLL_S)

    def _blame(self, what: str) -> None:
        said = {log.name: log.read_text()[-2000:] for log in sorted(self._directory.glob("*.log"))}
        said |= {
            name: "; ".join(f"{one['event']}: {one['reason']}" for one in keeper.events()[-8:])
            for name, keeper in self._keepers.items()
        }
        self.found.wrong.append({"generation": self._generation, "what": what, "said": said})

    # Counting.

    def _sample(self) -> None:
        for name in NAMES:
            last = self._keepers[name].last
            if last is None or last.poll() is not None:
                self._blame(f"the keeper of {name} has ended")
                return
        files = {
            str(file.relative_to(root))
            for root in (self._shm_dir, self._directory)
            for file in root.rglob("*")
            if file.is_file() and file.parent.parent.name != "log"
        }
        shared_bytes = sum(
            file.stat().st_blocks * 512 for file in self._shm_dir.rglob("*") if file.is_file()
        )
        self.found.samples.append(
            Sample(
                fds=_fds(os.getpid()),
                rss_bytes=_rss_bytes(os.getpid()),
                keepers={pid: (_fds(pid), _rss_bytes(pid)) for pid in map(self._keeper_pid, NAMES)},
                shared_bytes=shared_bytes,
                files=frozenset(files),
            )
        )


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _rss_bytes(pid: int) -> int:
    """Resident memory that is not shared."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


MEASURES: dict[str, tuple[Callable[[Sample], int], int]] = {
    "shared_bytes": (lambda sample: sample.shared_bytes, 2 << 20),
    "files": (lambda sample: len(sample.files), 2),
}
"""And by how much the most may differ, from one kill to another: two slots; a file and its
replacement."""

FDS_IDLE = 4
"""Connections of a keeper that may lie idle."""


def figures(found: Found, warm_up: int, growth_max: float) -> dict[str, Any]:
    """Everything for the report; what grew after the warm-up is wrong.

    What is not the same at every kill (connections that lie idle, slots that wait for their pins,
    files that are just being replaced) must reach no more in the last quarter than before, but for
    what one kill may leave and the next one take.
    """
    wrong = list(found.wrong)
    samples = found.samples[warm_up:]
    report: dict[str, Any] = {
        "kinds": dict(sorted(found.kinds.items())),
        "restores": found.restores,
        "steps_captured": found.steps_captured,
        "steps_skipped": found.steps_skipped,
        "copies_failed": found.copies_failed,
    }
    if len(samples) < SAMPLES_MIN:
        return {**report, "wrong": wrong}
    before, after = samples[: -len(samples) // 4], samples[-len(samples) // 4 :]
    first, last = samples[0], samples[-1]
    report["parent_fds"] = [first.fds, last.fds]
    report["parent_rss_mb"] = [round(one.rss_bytes / 1e6, 1) for one in (first, last)]
    if first.fds != last.fds:
        wrong.append(f"the parent has {last.fds} descriptors, {first.fds} after the warm-up")
    if last.rss_bytes > growth_max * first.rss_bytes:
        wrong.append(f"the parent grew from {first.rss_bytes} to {last.rss_bytes} bytes")
    for name, (measure, slack) in MEASURES.items():
        counts = [max(map(measure, part)) for part in (before, after)]
        report[name] = counts
        if counts[1] > counts[0] + slack:
            wrong.append(f"{name} grew: at most {counts[0]}, in the last quarter {counts[1]}")
    report["keepers"] = _keepers(samples)
    wrong += [
        f"keeper grew: {one}"
        for one in report["keepers"]
        if one["fds"][1] > one["fds"][0] + FDS_IDLE
        or one["rss_mb"][1] > growth_max * one["rss_mb"][0]
    ]
    return {**report, "wrong": wrong}


def _keepers(samples: list[Sample]) -> list[dict[str, Any]]:
    """Of the two keepers that lived longest, at the end of their warm-up and at their end.

    Descriptors: the most in the first and in the second half of a life.
    """
    lives: dict[int, list[tuple[int, int]]] = {}
    for sample in samples:
        for pid, found in sample.keepers.items():
            lives.setdefault(pid, []).append(found)
    longest = sorted(lives.values(), key=len, reverse=True)[:2]
    return [
        {
            "kills_survived": len(life),
            "fds": [max(fds for fds, _ in half) for half in (life[: len(life) // 2], life)],
            "rss_mb": [round(life[at][1] / 1e6, 1) for at in (KEEPER_WARM_UP, -1)],
        }
        for life in longest
        if len(life) > 2 * KEEPER_WARM_UP
    ]

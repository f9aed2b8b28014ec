"""Three hosts, and one that sleeps through a change of generation: what it changes when it wakes.

Generation 1 has rank 0 on h0, whose keeper commits, and rank 1 on h1. While h0's keeper (or the
rank on h1) is stopped, generation 2 begins on h1 and h2. Then the sleeper is continued.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tests.kit.keepers import (
    JOB,
    TOKEN,
    WAIT_S,
    KeeperHost,
    KitRank,
    eventually,
    keeper_host,
    make_structure,
)
from tests.kit.stopping_keeper import VARIABLE, Stop
from tests.kit.zombie_rank import Orders

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keys import done_key, image_key, manifest_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.sources import MEMORY
from keepstep.ckpt.tiers import Due, TierPolicy, Tiers
from keepstep.storage.errors import NotFound
from keepstep.storage.locate import open_store
from keepstep.storage.peer import PeerStore
from keepstep.storage.store import Store
from keepstep.storage.token import Token

NAMES = ("h0", "h1", "h2")
RANK_BYTES = 3 << 20
LAST = 3
"""Of generation 1: the step at which the sleeper stops. Steps 2 and 3 are due in the store."""

PATIENCE_S = 2.0
SETTLE_S = 1.0
_READ_BYTES_MAX = 1 << 26
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """Who sleeps, and when it falls asleep.

    Attributes:
        name: in words.
        stop: the operation at which h0's keeper stops itself; None: it is stopped from outside.
        is_rank: it is the rank on h1 that sleeps, with half an image written.
        lands: key that the sleeper still creates when it has been continued, as long as generation
            2 has committed nothing: then nobody has collected its temporary file. "": none.
    """

    name: str
    stop: tuple[str, str, bool] | None = None
    is_rank: bool = False
    lands: str = ""


STATE = State(1, LAST)
CASES = (
    Case("rank in the middle of a capture", is_rank=True),
    Case("keeper that nobody looks at"),
    Case(
        "keeper in the middle of an image",
        ("pwrite", r"s000000000003/.*r00000\.safetensors~", True),
        lands=image_key(STATE, 0),
    ),
    Case(
        "keeper before an image appears",
        ("rename", r"s000000000003/r00000\.safetensors$", False),
        lands=image_key(STATE, 0),
    ),
    Case(
        "keeper before a done record appears",
        ("rename", r"s000000000003/r00000\.json$", False),
        lands=done_key(STATE, 0),
    ),
    Case(
        "committer before the manifest appears",
        ("rename", r"s000000000003/manifest\.json$", False),
        lands=manifest_key(STATE),
    ),
    Case("committer before the log entry appears", ("link", r"/log/", False)),
    Case("committer before it knows that its entry is there", ("link", r"/log/", True)),
    Case("committer before it deletes", ("unlink", r"/r0000\d\.(json|safetensors)$", False)),
)


SLICE = (CASES[0], CASES[3], CASES[6])
"""One of each kind: a rank, a keeper, a committer."""


@dataclass(frozen=True)
class Holdings:
    """All bytes that must not change, as digests by name.

    Attributes:
        log: entries of the log.
        referred: files that the log's live commits refer to.
        held: images of the newer generation, and of its base, in the memory of its hosts.
    """

    log: dict[str, str]
    referred: dict[str, str]
    held: dict[str, str]


@dataclass
class Outcome:
    """What came of one case."""

    case: str
    before: Holdings
    after: Holdings
    base: State
    landed: bool
    zombie_said: tuple[str, ...]
    wrong: list[str] = field(default_factory=list)


class World:
    """The three hosts of one case.

    Args:
        directory: for everything.
        case: who sleeps.
        stack: ends everything.
    """

    def __init__(self, directory: Path, case: Case, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._case = case
        self._stack = stack
        self._armed = directory / "armed"
        self._structure = make_structure(2, RANK_BYTES)
        tiers = Tiers(peers=1, disk=TierPolicy(), store=TierPolicy(keep=1))
        self.hosts: list[KeeperHost] = [
            stack.enter_context(keeper_host(directory, name, tiers=tiers, patience_s=PATIENCE_S))
            for name in NAMES
        ]
        if case.stop is not None:
            operation, path, is_after = case.stop
            stop = Stop(operation, path, str(self._armed), is_after)
            self.hosts[0].module = "tests.kit.stopping_keeper"
            paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            self.hosts[0].environment |= {
                VARIABLE: stop.encoded(),
                "PYTHONPATH": os.pathsep.join(paths),
            }
        for host in self.hosts:
            host.start()
        self.store: Store = open_store(str(directory / "store"))
        self._zombie_rank: subprocess.Popen[str] | None = None
        self.wrong: list[str] = []

    # Generation 1.

    def first_generation(self) -> KitRank:
        """Until the sleeper sleeps. Returns rank 0, which knows of nothing."""
        term, addresses = self._promised(1, self.hosts[:2])
        self._append(1, None, term, ("h0", "h1"))
        one = self._rank(self.hosts[0], 0, 1, term, None, addresses)
        if self._case.is_rank:
            self._in_lockstep(one, self._process(term, addresses))
        else:
            two = self._rank(self.hosts[1], 1, 1, term, None, addresses)
            self._in_turn(one, two)
        return one

    def _in_turn(self, one: KitRank, two: KitRank) -> None:
        for step in range(1, LAST):
            due = Due.NOWHERE if step == 1 else Due.STORE
            self._step([one, two], step, due)
        self._wait_committed(State(1, LAST - 1))
        two.seal(LAST, LAST % 3, Due.STORE)
        self._wait_stored(done_key(STATE, 1))
        keeper = self.hosts[0].last
        assert keeper is not None
        if self._case.stop is None:
            one.seal(LAST, LAST % 3, Due.STORE)
            keeper.send_signal(signal.SIGSTOP)
        else:
            self._armed.touch()
            one.capture(LAST, LAST % 3, Due.STORE)
        self._wait_stopped(keeper.pid)

    def _in_lockstep(self, one: KitRank, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for step in range(1, LAST):
            one.seal(step, step % 3, Due.STORE)
            one.seat.agreed_acked = step - 1
            assert process.stdout.readline() == f"sealed {step}\n"
        self._wait_committed(State(1, LAST - 1))
        eventually(lambda: one.seat.acked >= LAST - 1, "h1 has what h0 sent")
        one.seal(LAST, LAST % 3, Due.STORE)
        self._wait_stopped(process.pid)

    # Generation 2.

    def second_generation(self, *, commits: bool) -> tuple[State, list[KitRank]]:
        """On h1 and h2, from the newest state that h1 has whole. `commits`: and one of its own."""
        term, addresses = self._promised(2, self.hosts[1:])
        base = self._newest_on(self.hosts[1], term)
        self._append(2, base, term, ("h1", "h2"))
        ranks = [
            self._rank(host, number, 2, term, base, addresses)
            for number, host in enumerate(self.hosts[1:])
        ]
        for step in range(base.step + 1, base.step + 4):
            due = Due.STORE if commits and step == base.step + 2 else Due.NOWHERE
            self._step(ranks, step, due)
        if commits:
            self._wait_committed(State(2, base.step + 2))
        time.sleep(SETTLE_S)  # for what follows a commit: the collection of older states
        return base, ranks

    def wake(self, old: KitRank, *, lands: str) -> tuple[str, ...]:
        """Continue the sleeper, and let it do what it can. What was heard of it."""
        if self._zombie_rank is not None:
            process = self._zombie_rank
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            said = tuple(process.stdout.readline().strip() for _ in range(3))
            time.sleep(SETTLE_S)
            return said
        keeper = self.hosts[0].last
        assert keeper is not None
        keeper.send_signal(signal.SIGCONT)
        said = tuple(self._capture_again(old, step) for step in (LAST + 1, LAST + 2))
        try:
            eventually(lambda: bool(self.hosts[0].events("superseded")), "the sleeper hears of it")
        except AssertionError as error:
            self.wrong.append(str(error))
        if lands:
            eventually(lambda: self.is_there(lands), f"{lands} lands")
        time.sleep(SETTLE_S)
        return said

    def go_on(self, base: State, ranks: list[KitRank]) -> None:
        """The newer generation steps on, and commits."""
        for step in (base.step + 4, base.step + 5):
            self._step(ranks, step, Due.STORE if step == base.step + 5 else Due.NOWHERE)
        self._wait_committed(State(2, base.step + 5))

    def holdings(self, base: State) -> Holdings:
        """What must not change."""
        root = self._directory / "store"
        entries = sorted(path for path in (root / "log").glob("*/[0-9]*") if path.is_file())
        referred: dict[str, str] = {}
        for commit in Log(self.store).read().live:
            keys = [manifest_key(commit.state), *(image_key(commit.state, rank) for rank in (0, 1))]
            referred |= {key: digest128(self.store.get(key, _READ_BYTES_MAX)) for key in keys}
        return Holdings(
            log={str(path.relative_to(root)): digest128(path.read_bytes()) for path in entries},
            referred=referred,
            held=self._held(base),
        )

    def is_there(self, key: str) -> bool:
        """Whether the store has it."""
        try:
            self.store.stat(key)
        except NotFound:
            return False
        return True

    # Inside.

    def _held(self, base: State) -> dict[str, str]:
        held: dict[str, str] = {}
        for host in self.hosts[1:]:
            inventory = host.take_inventory(2, 2)
            with contextlib.closing(
                PeerStore(inventory.address, MEMORY, Token(TOKEN), WAIT_S)
            ) as memory:
                for copy in inventory.copies:
                    if copy.state.generation == 2 or copy.state == base:
                        key = image_key(copy.state, copy.record.rank)
                        data = memory.get(key, _READ_BYTES_MAX)
                        held[f"{host.config.host}: {key}"] = digest128(data)
        return held

    def _promised(
        self, generation: int, hosts: list[KeeperHost]
    ) -> tuple[int, tuple[HostAddress, ...]]:
        term = Log(self.store, job=JOB).take_term("the kit")
        return term, tuple(
            HostAddress(host.config.host, "", host.take_inventory(generation, term).address)
            for host in hosts
        )

    def _append(self, number: int, base: State | None, term: int, hosts: tuple[str, ...]) -> None:
        log = Log(self.store, job=JOB)
        log.continue_term(term)
        mesh = self._structure.mesh
        log.append_from(base, Generation(number, hosts, mesh, base, None, {}))

    def _newest_on(self, host: KeeperHost, term: int) -> State:
        ranks: dict[State, set[int]] = {}
        for copy in host.take_inventory(2, term).copies:
            ranks.setdefault(copy.state, set()).add(copy.record.rank)
        return max(state for state, there in ranks.items() if there == {0, 1})

    def _rank(
        self,
        host: KeeperHost,
        rank: int,
        generation: int,
        term: int,
        base: State | None,
        addresses: tuple[HostAddress, ...],
    ) -> KitRank:
        made = KitRank(
            host,
            self._structure,
            rank,
            generation=generation,
            term=term,
            base=base,
            hosts=(0, 1),
            addresses=addresses,
        )
        self._stack.callback(made.close)
        return made

    def _process(self, term: int, addresses: tuple[HostAddress, ...]) -> subprocess.Popen[str]:
        orders = Orders(
            directory=str(self._directory),
            host="h1",
            rank=1,
            ranks=2,
            rank_bytes=RANK_BYTES,
            hosts=(0, 1),
            addresses=addresses,
            term=term,
            steps=tuple(range(1, LAST)),
            stops_at=LAST,
            later=(LAST + 1, LAST + 2),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.zombie_rank", msgspec.json.encode(orders).decode()],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        self._zombie_rank = process
        return process

    def _step(self, ranks: list[KitRank], step: int, due: Due) -> None:
        position = (step - 1) % 3
        for rank in ranks:
            rank.seal(step, position, due)
        eventually(lambda: all(rank.seat.acked >= step for rank in ranks), f"step {step} is acked")
        for rank in ranks:
            rank.seat.agreed_acked = step

    def _capture_again(self, old: KitRank, step: int) -> str:
        try:
            old.capture(step, step % 3, Due.STORE)
        except CheckpointError as error:
            return f"refused {step}: {type(error).__name__}"
        return f"captured {step}"

    def _wait_committed(self, state: State) -> None:
        eventually(
            lambda: any(one.state == state for one in Log(self.store).read().live),
            f"{state} is committed",
        )

    def _wait_stored(self, key: str) -> None:
        eventually(lambda: self.is_there(key), f"{key} is in the store")

    def _wait_stopped(self, pid: int) -> None:
        eventually(lambda: _is_stopped(pid), f"process {pid} has stopped itself")


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def _awake(world: World) -> Iterator[None]:
    """Whatever happens: stopped processes can be ended."""
    try:
        yield
    finally:
        for host in world.hosts:
            if host.last is not None and host.last.poll() is None:
                os.kill(host.last.pid, signal.SIGCONT)


def run_case(directory: Path, case: Case, *, commits: bool) -> Outcome:
    """One case, from the beginning to a commit of the newer generation after it all.

    `commits`: generation 2 has a commit of its own before the sleeper wakes.
    """
    with contextlib.ExitStack() as stack:
        world = World(directory, case, stack)
        stack.enter_context(_awake(world))
        old = world.first_generation()
        base, ranks = world.second_generation(commits=commits)
        before = world.holdings(base)
        lands = "" if commits else case.lands
        said = world.wake(old, lands=lands)
        after = world.holdings(base)
        outcome = Outcome(
            case=case.name,
            before=before,
            after=after,
            base=base,
            landed=bool(lands) and world.is_there(lands),
            zombie_said=said,
            wrong=list(world.wrong),
        )
        for name in ("log", "referred", "held"):
            mine, theirs = getattr(before, name), getattr(after, name)
            if not mine or mine != theirs:
                changed = sorted(key for key in mine | theirs if mine.get(key) != theirs.get(key))
                outcome.wrong.append(f"{name} of {len(mine)} things changed: {changed}")
        world.go_on(base, ranks)
        return outcome

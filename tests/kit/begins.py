"""Ranks that begin, capture and vanish, with a state whose every element follows from the step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.kit.keepers import JOB, TOKEN, WAIT_S, KeeperHost, keeper_host

from keepstep.ckpt.address import Address
from keepstep.ckpt.agree import all_gather_bytes, gather_structure
from keepstep.ckpt.begin import Begun, Home, Wanted, begin
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import Manifest, State
from keepstep.ckpt.placement import Mesh, MeshAxis, Split, coordinates
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slots import Level
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.tiers import Due, TierPolicy, Tiers
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store
from keepstep.storage.token import Token

ROWS, COLUMNS = 1_536, 1_024
"""Of the split matrix: 6 MiB. The copied vector has as many bytes as one of its columns' halves."""

PEERS = Tiers(peers=1, disk=TierPolicy(), store=TierPolicy())


class Toy:
    """A matrix split by rows over tp, a vector that all ranks hold, and the step.

    Args:
        dp, tp: the mesh's sizes.
        rank: whose part this is.
    """

    def __init__(self, dp: int, tp: int, rank: int) -> None:
        self.mesh = Mesh((MeshAxis("dp_replicate", dp), MeshAxis("tp", tp)))
        self._part = coordinates(self.mesh, rank)[1]
        self._rows = ROWS // tp
        self.matrix = torch.zeros(self._rows, COLUMNS)
        self.vector = torch.zeros(700_000)
        self.step = 0
        self.registry = Registry(self.mesh, rank)
        self.registry.add_tensor(
            "model/matrix", self.matrix, splits=[Split("tp", 0)], shape=(ROWS, COLUMNS)
        )
        self.registry.add_tensor("model/vector", self.vector)
        self.registry.add_value("step", lambda: self.step, self._set_step)

    def _set_step(self, step: int) -> None:
        self.step = step

    def advance(self, step: int) -> None:
        """The state after `step`."""
        self.step = step
        start = self._part * self._rows * COLUMNS
        count = self._rows * COLUMNS
        numbers = torch.arange(start, start + count, dtype=torch.float32)
        self.matrix.copy_((numbers + step).view(self._rows, COLUMNS))
        self.vector.copy_(torch.arange(700_000, dtype=torch.float32) * step)

    @property
    def shows(self) -> int | None:
        """The step whose state this is, to the bit; None: of no step."""
        other = Toy(self.mesh.axes[0].size, self.mesh.axes[1].size, self.registry.rank)
        other.advance(self.step)
        if not self.step:
            other.matrix.zero_()
        same = torch.equal(self.matrix, other.matrix) and torch.equal(self.vector, other.vector)
        return self.step if same else None


@dataclass(frozen=True)
class Site:
    """What ranks are told: where they live and where the store is. Sent to their processes."""

    store: str
    hosts: tuple[str, ...]
    """By rank."""
    host_dirs: dict[str, str]
    disk_dirs: dict[str, str] = field(default_factory=dict)
    has_keepers: bool = True
    init_from: str = ""
    last_step: int | None = None
    due: Due = Due.NOWHERE

    def home(self, rank: int, stack: contextlib.ExitStack) -> Home:
        """This rank's host; its connection ends with `stack`."""
        host = self.hosts[rank]
        if not self.has_keepers:
            return Home(host=host)
        host_dir = Path(self.host_dirs[host])
        disk_dir = self.disk_dirs.get(host)
        return Home(
            host=host,
            keeper=stack.enter_context(KeeperClient(host_dir, WAIT_S)),
            host_dir=host_dir,
            disk_dir=Path(disk_dir) if disk_dir else None,
            token=Token(TOKEN),
        )


@dataclass(frozen=True)
class Came:
    """What a rank has to say of its beginning."""

    base: State | None
    shows: int | None
    generation: int
    is_committed: bool
    passed_over: tuple[str, ...]
    read_bytes: dict[str, int]
    events: tuple[tuple[str, str, dict[str, Any]], ...]

    def told(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        return [(reason, details) for each, reason, details in self.events if each == kind]


@contextlib.contextmanager
def site(
    directory: Path, hosts: Sequence[str], tiers: Tiers = PEERS, *, has_disk: bool = False
) -> Iterator[tuple[Site, dict[str, KeeperHost]]]:
    """A keeper for each host, alive; `hosts` is by rank."""
    with contextlib.ExitStack() as stack:
        keepers: dict[str, KeeperHost] = {}
        for host in sorted(set(hosts)):
            disk = str(directory / f"disk-{host}") if has_disk else ""
            if disk:
                Path(disk).mkdir(exist_ok=True)
            keepers[host] = stack.enter_context(
                keeper_host(directory, host, tiers=tiers, patience_s=60.0, disk_dir=disk)
            )
            keepers[host].start()
        yield (
            Site(
                store=str(directory / "store"),
                hosts=tuple(hosts),
                host_dirs={name: str(each.place.path) for name, each in keepers.items()},
                disk_dirs={
                    name: each.config.disk_dir
                    for name, each in keepers.items()
                    if each.config.disk_dir
                },
            ),
            keepers,
        )


def begin_here(
    rank: int,
    toy: Toy,
    place: Site,
    stack: contextlib.ExitStack,
    wrap: Callable[[Store], Store] = lambda store: store,
    refuse: Callable[[Manifest], str] = lambda manifest: "",
    timeout_s: float = 3.0,
) -> tuple[Begun, Snapshots, list[tuple[str, str, dict[str, Any]]]]:
    """Begin on this rank."""
    events: list[tuple[str, str, dict[str, Any]]] = []
    structure = gather_structure(None, toy.registry)
    snapshots = Snapshots(toy.registry, structure, JOB)
    store = wrap(open_store(place.store))
    wanted = Wanted(
        job=JOB,
        by=f"test rank {rank}",
        header=snapshots.header,
        image_bytes_max=snapshots.size_bytes,
        init_from=Address(place.init_from, None) if place.init_from else None,
        last_step=place.last_step,
        refuse=refuse,
        tell=lambda kind, reason, **details: events.append((kind, reason, details)),
    )
    log = Log(store, job=JOB) if rank == 0 else None
    home = dataclasses.replace(place.home(rank, stack), timeout_s=timeout_s)
    begun = begin(None, toy.registry, structure, store, log, home, wanted)
    return begun, snapshots, events


def came(begun: Begun, toy: Toy, events: list[tuple[str, str, dict[str, Any]]]) -> Came:
    """What is sent back from the rank's process."""
    return Came(
        base=begun.base,
        shows=toy.shows,
        generation=begun.generation,
        is_committed=begun.is_committed,
        passed_over=begun.passed_over,
        read_bytes=dict(begun.read_bytes),
        events=tuple(events),
    )


def run_steps(
    rank: int, world: int, place: Site, sizes: tuple[int, int], steps: Sequence[int], last_of: int
) -> Came:
    """Begin, capture these steps, wait until each is safe, and vanish without a word.

    `last_of`: ranks at and above it leave the last step out, as if they had died before it.
    """
    toy = Toy(*sizes, rank)
    with contextlib.ExitStack() as stack:
        begun, snapshots, events = begin_here(rank, toy, place, stack)
        result = came(begun, toy, events)
        assert begun.entered is not None
        snapshots.open(begun.entered, begun.generation, 3, is_from_nothing=begun.base is None)
        agreed = Level()
        for step in steps:
            toy.advance(step)
            if step == steps[-1] and rank >= last_of:
                break
            due = place.due
            made = snapshots.capture(State(begun.generation, step), due, agreed)
            assert not made.skipped, made.skipped
            deadline_s = time.monotonic() + WAIT_S
            while snapshots.level().acked < step or (due and snapshots.level().drained < step):
                assert time.monotonic() < deadline_s, f"step {step} is not safe: {events}"
                time.sleep(0.01)
            agreed = Level(step, step if due else -1)
            if step != steps[-1]:
                all_gather_bytes(None, b"done")
        all_gather_bytes(None, b"over")
        snapshots.close()
    return result


def begin_again(rank: int, world: int, place: Site, sizes: tuple[int, int]) -> Came:
    """Begin, and say what came of it."""
    toy = Toy(*sizes, rank)
    with contextlib.ExitStack() as stack:
        begun, _, events = begin_here(rank, toy, place, stack)
    return came(begun, toy, events)


def without(place: Site, host: str, hosts: Sequence[str]) -> Site:
    """The site when `host` is gone, and ranks live on `hosts`."""
    assert host not in hosts
    return dataclasses.replace(place, hosts=tuple(hosts))

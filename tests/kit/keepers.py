"""Keeper processes for tests, and ranks that speak to them without torch.

A rank of the kit is this process, or a child of it: it attaches, enters, and writes images whose
bytes follow from state and rank alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from keepstep.ckpt.bell import Ringer
from keepstep.ckpt.control import Enter, Entered
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.events import read_events
from keepstep.ckpt.hostdir import HostDir, host_dir_path
from keepstep.ckpt.image import ImageHeader, build, items_of
from keepstep.ckpt.inventory import HostAddress, Inventory
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import KeeperGone
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, MeshAxis, Placement, Split
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_table import Seat, SlotStatus
from keepstep.ckpt.process import this_process
from keepstep.ckpt.structure import HeldTensor, Structure, structure_of
from keepstep.ckpt.tiers import Due, Tiers

JOB = "demo"
HOST = "h0"
WAIT_S = 60.0
TOKEN = "kit-token-kit-token"


def make_structure(ranks: int, rank_bytes: int = 3 << 20) -> Structure:
    """A tensor of about `rank_bytes` for each rank, split among them, and a small one."""
    mesh = Mesh((MeshAxis("dp", ranks),))
    rows = max(1, rank_bytes // 1024)
    held = {
        "model/w": HeldTensor((ranks * rows, 256), "F32", Placement((Split("dp", 0),))),
        "model/b": HeldTensor((ranks, 7), "F32", Placement((Split("dp", 0),))),
    }
    return structure_of(mesh, held, {})


def header_of(structure: Structure, rank: int) -> ImageHeader:
    """The header that a rank of the job has, for no particular state."""
    plan = Plan(structure.mesh, structure.placements, structure.tensors)
    items = items_of(structure.tensors, plan.owned(rank))
    return build(JOB, State(0, 0), rank, structure.mesh, structure.digest, items)


def data_of(state: State, rank: int, size_bytes: int) -> bytes:
    """The data of an image: follows from these alone."""
    return random.Random(f"{state.generation} {state.step} {rank}").randbytes(size_bytes)


def eventually(is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until `is_so`. Fails after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not so after {timeout_s} s: {what}"
        time.sleep(0.005)


@dataclass
class KeeperHost:
    """One host of the kit: its configuration, its directories, its keeper processes.

    `last`: the keeper that was started last. `module`: what is run as its keeper.
    """

    directory: Path
    config: KeeperConfig
    environment: dict[str, str]
    last: subprocess.Popen[bytes] | None = None
    module: str = "keepstep.ckpt.keeper"
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def place(self) -> HostDir:
        return HostDir(host_dir_path(self.config.shm_dir, self.config.job, self.config.host))

    def start(self, *, is_waited_for: bool = True) -> subprocess.Popen[bytes]:
        """Start a keeper; wait until its socket answers."""
        path = self.directory / f"{self.config.host}-config.json"
        self.config.write(path)
        with (self.directory / f"{self.config.host}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                cwd="/",
            )
        self.started.append(process)
        self.last = process
        if is_waited_for:
            eventually(lambda: process.poll() is not None or self._answers(), "the keeper answers")
            assert process.poll() is None, self.output()
        return process

    def kill(self) -> None:
        """SIGKILL the keeper that was started last."""
        assert self.last is not None
        self.last.kill()
        self.last.wait(WAIT_S)

    def end(self, timeout_s: float = WAIT_S) -> int:
        """SIGTERM the keeper that was started last; its exit code."""
        assert self.last is not None
        self.last.send_signal(signal.SIGTERM)
        return self.last.wait(timeout_s)

    def output(self) -> str:
        """What all its keepers have printed."""
        return (self.directory / f"{self.config.host}.log").read_text()

    def client(self, rank: int = 0, timeout_s: float = WAIT_S) -> KeeperClient:
        """An attached client of this process."""
        client = KeeperClient(self.place.path, timeout_s)
        me = this_process()
        try:
            client.attach(self.config.job, rank, me.pid, me.ticks)
        except CheckpointError:
            client.close()
            raise
        return client

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """The inventory, promised."""
        with contextlib.closing(self.client()) as client:
            return client.take_inventory(generation, term)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What its keepers told."""
        return [
            event
            for event in read_events(Path(self.config.events_path).parent, kind)
            if event.get("of_host") == self.config.host
        ]

    def _answers(self) -> bool:
        with contextlib.suppress(KeeperGone):
            KeeperClient(self.place.path, WAIT_S).close()
            return True
        return False


@contextlib.contextmanager
def keeper_host(directory: Path, host: str = HOST, **changes: object) -> Iterator[KeeperHost]:
    """A host, no keeper started yet. At the end all its keepers are killed."""
    (directory / "run").mkdir(exist_ok=True)
    (directory / "store").mkdir(exist_ok=True)
    config = KeeperConfig(
        job=JOB,
        host=host,
        store_url=str(directory / "store"),
        shm_dir=str(directory / "shm"),
        events_path=str(directory / "run" / "events.jsonl"),
        patience_s=2.0,
        tiers=Tiers(peers=0),
    )
    config = msgspec.structs.replace(config, **changes)
    made = KeeperHost(directory, config, {**os.environ, "KEEPSTEP_TOKEN": TOKEN})
    try:
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.wait(WAIT_S)


def enter_of(
    host: KeeperHost,
    structure: Structure,
    rank: int = 0,
    generation: int = 1,
    term: int = 1,
    base: State | None = None,
    hosts: Sequence[int] | None = None,
    addresses: Sequence[HostAddress] | None = None,
) -> Enter:
    """What a rank of `host` sends. Without `hosts` and `addresses` all ranks are on host h0."""
    header = header_of(structure, rank)
    hosts = tuple(hosts or (0,) * structure.mesh.axes[0].size)
    addresses = tuple(addresses or (HostAddress(HOST, "", ""),))
    return Enter(
        generation=generation,
        term=term,
        rank=rank,
        ranks=tuple(one for one, at in enumerate(hosts) if addresses[at].host == host.config.host),
        hosts=hosts,
        addresses=addresses,
        committer=0,
        base=base,
        structure=structure,
        header=header.encoded,
        image_bytes_max=header.size_bytes,
    )


class KitRank:
    """A rank, as far as a keeper can see: it enters and writes images into its slots in turn."""

    def __init__(
        self,
        host: KeeperHost,
        structure: Structure,
        rank: int = 0,
        *,
        generation: int = 1,
        term: int = 1,
        base: State | None = None,
        hosts: Sequence[int] | None = None,
        addresses: Sequence[HostAddress] | None = None,
        header: bytes | None = None,
    ) -> None:
        self.host = host
        self.rank = rank
        self.generation = generation
        self.header = header_of(structure, rank)
        self.writer = this_process()
        self.client = host.client(rank)
        self.enter = enter_of(host, structure, rank, generation, term, base, hosts, addresses)
        if header is not None:
            self.enter = msgspec.structs.replace(self.enter, header=header)
        try:
            self.entered: Entered = self.client.enter(self.enter)
        except CheckpointError:
            self.client.close()
            raise
        self.pool = Pool.open(Path(self.entered.pool))
        self.ringer = Ringer(host.place.bell)

    @property
    def seat(self) -> Seat:
        return self.pool.seats[self.entered.seat]

    def slot(self, position: int) -> Slot:
        """One of its slots, by its place among these."""
        return self.pool.slots[self.entered.slots[position]]

    def begin(self, step: int, position: int = 0, due: Due = Due.NOWHERE) -> Slot:
        """Claim a slot and write the data of a state, but leave it FILLING."""
        slot = self.slot(position)
        state = State(self.generation, step)
        slot.claim(self.writer, self.rank, state, due)
        begin, end = self.header.header_bytes, self.header.size_bytes
        slot.image[begin:end] = data_of(state, self.rank, end - begin)
        return slot

    def capture(self, step: int, position: int = 0, due: Due = Due.NOWHERE) -> Slot:
        """Write a whole image, and ring."""
        slot = self.begin(step, position, due)
        values = msgspec.json.encode({"cursor": step, "name": f"step {step}"})
        slot.captured(values, self.header.size_bytes)
        self.ringer.ring()
        return slot

    def seal(self, step: int, position: int = 0, due: Due = Due.NOWHERE) -> Slot:
        """Capture, and wait for the keeper to seal it."""
        slot = self.capture(step, position, due)
        eventually(lambda: slot.status is SlotStatus.SEALED, f"step {step} is sealed")
        return slot

    def holds(self, slot: Slot, state: State) -> bool:
        """Whether the slot has, byte for byte, the data of the state."""
        begin, end = self.header.header_bytes, self.header.size_bytes
        return bytes(slot.image[begin:end]) == data_of(state, self.rank, end - begin)

    def close(self) -> None:
        """Let go of everything here; the keeper is told nothing."""
        self.client.close()
        self.ringer.close()
        self.pool.close()


CHILD = """
import sys, time
from pathlib import Path
import msgspec
from tests.kit.keepers import KitRank, KeeperHost, make_structure
from keepstep.ckpt.keeper_config import read_config
directory, config, call, generation = sys.argv[1:]
host = KeeperHost(Path(directory), read_config(Path(config)), {})
rank = KitRank(host, make_structure(1), generation=int(generation), term=int(generation))
getattr(rank, call)(7)
print("ready", flush=True)
time.sleep(120)
"""


@contextlib.contextmanager
def rank_process(
    host: KeeperHost, call: str, generation: int = 1
) -> Iterator[subprocess.Popen[str]]:
    """A process that has entered as rank 0 of 1, and called `KitRank.<call>(7)`. Killed at last."""
    root = Path(__file__).resolve().parents[2]
    config = host.directory / f"{host.config.host}-config.json"
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(host.directory), str(config), call, str(generation)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)

"""Hosts in this process: all that keepers have for each other, over loopback, but no processes.

A rank of a side is the test: it enters, and writes images whose bytes follow from state and rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tests.kit.keepers import JOB, TOKEN, data_of, eventually, header_of

from keepstep.ckpt.control import Enter, Entered
from keepstep.ckpt.data_plane import DataPlane
from keepstep.ckpt.entering import enter_rank
from keepstep.ckpt.host_answers import HostAnswers
from keepstep.ckpt.hostdir import make_host_dir
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keeper_record import KeeperRecord
from keepstep.ckpt.manifest import State
from keepstep.ckpt.peer_memory import PeerMemory
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_store import PoolStore
from keepstep.ckpt.pool_table import Seat
from keepstep.ckpt.process import this_process
from keepstep.ckpt.receiver import Receiver
from keepstep.ckpt.replicator import Replicator
from keepstep.ckpt.sealer import Sealer
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.structures import Structures
from keepstep.ckpt.tiers import Due, Tiers
from keepstep.storage.file import FileStore
from keepstep.storage.token import Token

PATIENCE_S = 4.0
TOKEN_OF_KIT = Token(TOKEN)


@dataclass
class Side:
    """One host. `address`: of its data plane. `moved`: where others' hints say hosts are now."""

    config: KeeperConfig
    memory: KeeperMemory
    sealer: Sealer
    answers: HostAnswers
    slots: PeerMemory
    receiver: Receiver
    plane: DataPlane
    address: str
    pulled_from: str
    events: list[tuple[str, str, dict[str, Any]]]
    moved: dict[str, str] = field(default_factory=dict)
    replicator: Replicator | None = None
    entered: dict[int, Entered] = field(default_factory=dict)
    headers: dict[int, ImageHeader] = field(default_factory=dict)

    @property
    def here(self) -> HostAddress:
        return HostAddress(self.config.host, self.config.rack, self.address)

    @property
    def shelf(self) -> Shelf:
        return self.memory.shelf

    @property
    def rank(self) -> int:
        """The first that entered."""
        return next(iter(self.entered))

    @property
    def seat(self) -> Seat:
        """Of the first rank that entered."""
        return self.memory.pool.seats[self.entered[self.rank].seat]

    def client(self, timeout_s: float = 20.0) -> PlaneClient:
        return PlaneClient(self.address, TOKEN_OF_KIT, timeout_s)

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The details of all events of a kind."""
        return [details for one, _, details in tuple(self.events) if one == kind]

    def enter(
        self,
        structure: Structure,
        addresses: Sequence[HostAddress],
        *,
        rank: int,
        generation: int = 1,
        term: int = 1,
        base: State | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        """A rank of this host enters; rank r is on host `hosts[r]`, or on host r."""
        places = tuple(hosts or range(len(addresses)))
        self.headers[rank] = header_of(structure, rank)
        enter = Enter(
            generation=generation,
            term=term,
            rank=rank,
            ranks=tuple(one for one, at in enumerate(places) if addresses[at] == self.here),
            hosts=places,
            addresses=tuple(addresses),
            committer=0,
            base=base,
            structure=structure,
            header=self.headers[rank].encoded,
            image_bytes_max=self.headers[rank].size_bytes,
        )
        if self.replicator is None:
            self.replicator = Replicator(
                self.config,
                self.shelf,
                self.memory,
                TOKEN_OF_KIT,
                self.pulled_from,
                self.memory.agreed_acked,
                self.moved.get,
            )
        entered = enter_rank(self.memory, enter, this_process(), self.replicator.enter)
        self.entered[rank] = entered

    def slot(self, position: int, rank: int | None = None) -> Slot:
        """One of a rank's slots, by its place among these."""
        entered = self.entered[self.rank if rank is None else rank]
        return self.memory.pool.slots[entered.slots[position]]

    def seal(self, step: int, position: int | None = None, rank: int | None = None) -> State:
        """Capture and seal the state after `step` in a slot (the next in turn)."""
        rank = self.rank if rank is None else rank
        header = self.headers[rank]
        place = step % len(self.entered[rank].slots) if position is None else position
        slot = self.slot(place, rank)
        state = State(self.seat.generation, step)
        slot.claim(this_process(), rank, state, Due.NOWHERE)
        begin, end = header.header_bytes, header.size_bytes
        slot.image[begin:end] = data_of(state, rank, end - begin)
        slot.captured(msgspec.json.encode({"cursor": step}), header.size_bytes)
        self.sealer.submit_captured()
        assert self.sealer.wait_idle(20.0)
        return state

    def agree(self, acked: int) -> None:
        """The rank learns what all have."""
        self.seat.agreed_acked = acked

    def has(self, state: State, rank: int) -> bool:
        """Whether a copy is there, byte for byte as it was written."""
        found = self.shelf.find(state, rank)
        if found is None:
            return False
        data = bytes(found.view[found.header.header_bytes :])
        return data == data_of(state, rank, len(data)) and found.values == {"cursor": state.step}

    def wait_for(self, state: State, rank: int) -> None:
        """Wait for a copy."""
        eventually(lambda: self.shelf.find(state, rank) is not None, f"{state} of rank {rank}")
        assert self.has(state, rank)

    def wait_acked(self, step: int) -> None:
        """Wait until this host's rank may count on a step."""
        eventually(lambda: self.seat.acked >= step, f"step {step} is acked")

    def wait_told(self, kind: str, times: int = 1) -> None:
        """Wait for events of a kind."""
        eventually(lambda: len(self.told(kind)) >= times, kind)

    def close(self) -> None:
        if self.replicator is not None:
            self.replicator.close(0.0)
        self.plane.close()
        self.sealer.close(20.0)
        self.memory.close()
        self.memory.pool.close()


@contextlib.contextmanager
def side(
    directory: Path,
    host: str,
    *,
    port: int = 0,
    patience_s: float = PATIENCE_S,
    pulled_from: Callable[[str], str] = lambda address: address,
    peers: int = 1,
) -> Iterator[Side]:
    """A host whose peers pull from `pulled_from(its address)`: for a proxy between."""
    config = KeeperConfig(
        job=JOB,
        host=host,
        store_url="",
        shm_dir=str(directory / f"shm-{host}"),
        port=port,
        patience_s=patience_s,
        tiers=Tiers(peers=peers),
    )
    events: list[tuple[str, str, dict[str, Any]]] = []

    def tell(kind: str, reason: str, **details: object) -> None:
        events.append((kind, reason, details))

    place = make_host_dir(Path(config.shm_dir), JOB, host)
    pool = Pool.open(place.pool) if place.pool.exists() else Pool.create(place.pool)
    structures = Structures(place, JOB)
    memory = KeeperMemory(config, place, pool, Shelf(), structures, KeeperRecord(), tell)
    made: list[Side] = []

    def on_sealed(shelved: Shelved) -> None:
        if made and made[0].replicator is not None:
            made[0].replicator.sealed(shelved)

    sealer = Sealer(memory, on_sealed)
    answers = HostAnswers(memory, sealer, None, lambda generation: None, dict)
    slots = PeerMemory(memory)
    receiver = Receiver(config, slots, answers.check_fence, memory.shelf, memory, TOKEN_OF_KIT)
    disk = directory / f"disk-{host}"
    disk.mkdir(exist_ok=True)
    stores = {"memory": PoolStore(pool), "disk": FileStore(disk)}
    plane = DataPlane(config, TOKEN_OF_KIT, answers, slots, stores, receiver)
    address = plane.start()
    memory.listen_at(address)
    sealer.start()
    memory.is_adopted.wait(20.0)
    parts = (config, memory, sealer, answers, slots, receiver, plane)
    made.append(Side(*parts, address, pulled_from(address), events))
    try:
        yield made[0]
    finally:
        made[0].close()


@contextlib.contextmanager
def no_threads_stay() -> Iterator[None]:
    """Fails if threads of ours are left behind inside."""
    before = set(threading.enumerate())

    def left() -> list[str]:
        now = set(threading.enumerate()) - before
        return [thread.name for thread in now if thread.name.startswith("keepstep")]

    yield
    eventually(lambda: not left(), f"threads end: {left()}")

"""A rank in a process of its own that stops itself (SIGSTOP) in the middle of a capture."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from tests.kit.keepers import KeeperHost, KitRank, data_of, make_structure

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_config import read_config
from keepstep.ckpt.manifest import State
from keepstep.ckpt.tiers import Due

AGAIN_S = 0.1


class Orders(msgspec.Struct, frozen=True):
    """Who it is, and what it captures. `steps`: those before the last, in which it stops."""

    directory: str
    host: str
    rank: int
    ranks: int
    rank_bytes: int
    hosts: tuple[int, ...]
    addresses: tuple[HostAddress, ...]
    term: int
    steps: tuple[int, ...]
    stops_at: int
    later: tuple[int, ...]


def main(arguments: list[str]) -> None:
    """Capture, stop, and when it is continued go on as if nothing had been."""
    orders = msgspec.json.decode(arguments[0], type=Orders)
    directory = Path(orders.directory)
    config = read_config(directory / f"{orders.host}-config.json")
    structure = make_structure(orders.ranks, orders.rank_bytes)
    rank = KitRank(
        KeeperHost(directory, config, {}),
        structure,
        orders.rank,
        term=orders.term,
        hosts=orders.hosts,
        addresses=orders.addresses,
    )
    for step in orders.steps:
        rank.seal(step, step % 3, Due.STORE)
        rank.seat.agreed_acked = step - 1
        sys.stdout.write(f"sealed {step}\n")
        sys.stdout.flush()
    _stop_in(rank, orders.stops_at)
    for step in orders.later:
        try:
            rank.capture(step, step % 3, Due.STORE)
            said = f"captured {step}"
        except CheckpointError as error:
            said = f"refused {step}: {type(error).__name__}"
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()
        time.sleep(AGAIN_S)
    time.sleep(120)


def _stop_in(rank: KitRank, step: int) -> None:
    """Stop when half of an image is written; then write the other half."""
    slot = rank.slot(step % 3)
    state = State(rank.generation, step)
    slot.claim(rank.writer, rank.rank, state, Due.STORE)
    begin, end = rank.header.header_bytes, rank.header.size_bytes
    data, middle = data_of(state, rank.rank, end - begin), (end - begin) // 2
    slot.image[begin : begin + middle] = data[:middle]
    os.kill(os.getpid(), signal.SIGSTOP)
    slot.image[begin + middle : end] = data[middle:]
    try:
        slot.captured(b"{}", end)
        rank.ringer.ring()
        said = f"captured {step}"
    except CheckpointError as error:
        said = f"refused {step}: {type(error).__name__}"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

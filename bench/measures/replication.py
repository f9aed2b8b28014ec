"""An image from one host's memory to another's: two keepers on loopback, one way."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.measures.limits import loopback_s
from tests.kit.keepers import KitRank, keeper_host, make_structure

from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.tiers import Due, Tiers

POLL_S = 0.0002
WAIT_S = 120.0
HOSTS = ("h0", "h1")


def replication(directory: Path, size_bytes: int, repetitions: int) -> dict[str, Any]:
    """Seconds from sealed to acknowledged, and of one stream of the same bytes beside it."""
    shm_dir = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir="/dev/shm"))
    try:
        with contextlib.ExitStack() as stack:
            rank = _entered(directory, shm_dir, size_bytes, stack)
            rounds = []
            for number in range(repetitions + 1):
                found = {"stream": loopback_s(shm_dir, size_bytes)} if number % 2 else {}
                found["replicated"] = _replicate_s(rank, number + 1)
                if not number % 2:
                    found["stream"] = loopback_s(shm_dir, size_bytes)
                if number:  # the first one warms up: memory touched, connections made
                    rounds.append(found)
    finally:
        shutil.rmtree(shm_dir, ignore_errors=True)
    return {
        "bytes": size_bytes,
        "seconds": {
            name: statistics.median(one[name] for one in rounds)
            for name in ("replicated", "stream")
        },
        "of_stream": statistics.median(one["stream"] / one["replicated"] for one in rounds),
        "rounds": rounds,
    }


def _entered(
    directory: Path, shm_dir: Path, size_bytes: int, stack: contextlib.ExitStack
) -> KitRank:
    """Rank 0 on the first host; rank 1 on the second, to which its images go. No other work."""
    hosts = [
        stack.enter_context(
            keeper_host(
                directory, name, shm_dir=str(shm_dir), tiers=Tiers(peers=1), patience_s=60.0
            )
        )
        for name in HOSTS
    ]
    for host in hosts:
        host.start()
    addresses = [
        HostAddress(name, "", host.take_inventory(1, 1).address)
        for name, host in zip(HOSTS, hosts, strict=True)
    ]
    structure = make_structure(len(hosts), size_bytes)
    ranks = [
        stack.enter_context(
            contextlib.closing(KitRank(host, structure, number, hosts=(0, 1), addresses=addresses))
        )
        for number, host in enumerate(hosts)
    ]
    sender = ranks[0]
    for index in sender.entered.slots:
        torch.frombuffer(sender.pool.slots[index].image, dtype=torch.uint8).random_(0, 256)
    return sender


def _replicate_s(rank: KitRank, step: int) -> float:
    slot = _claimed(rank, step)
    slot.captured(b"{}", rank.header.size_bytes)
    rank.ringer.ring()
    _wait(lambda: rank.seat.sealed >= step, "sealed")
    began_s = time.perf_counter()
    _wait(lambda: rank.seat.acked >= step, "acknowledged")
    took_s = time.perf_counter() - began_s
    assert slot.status is SlotStatus.SEALED
    return took_s


def _claimed(rank: KitRank, step: int) -> Slot:
    slot = rank.slot(step % len(rank.entered.slots))
    rank.seat.agreed_acked = step - 1
    slot.claim(rank.writer, rank.rank, State(rank.generation, step), Due.NOWHERE)
    return slot


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.perf_counter() + WAIT_S
    while not is_so():
        if time.perf_counter() > deadline_s:
            raise SystemExit(f"not {what} after {WAIT_S} s")
        time.sleep(POLL_S)

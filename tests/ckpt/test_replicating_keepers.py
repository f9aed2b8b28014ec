"""Replication between keeper processes: killed, started anew, stopped and continued."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.keepers import TOKEN, KeeperHost, KitRank, eventually, keeper_host, make_structure

from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_record import read_record
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import State
from keepstep.ckpt.tiers import Tier, Tiers
from keepstep.storage.peer import PeerStore
from keepstep.storage.token import Token

pytestmark = pytest.mark.ranks

STRUCTURE = make_structure(2, rank_bytes=1 << 20)


@contextlib.contextmanager
def two_hosts(tmp_path: Path) -> Iterator[tuple[KeeperHost, KeeperHost, KitRank, KitRank]]:
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(keeper_host(tmp_path, name, tiers=Tiers(peers=1), patience_s=5.0))
            for name in ("h0", "h1")
        ]
        for host in hosts:
            host.start()
        addresses = [here(host) for host in hosts]
        ranks = []
        for rank, host in enumerate(hosts):
            made = KitRank(host, STRUCTURE, rank, hosts=(0, 1), addresses=addresses)
            ranks.append(stack.enter_context(contextlib.closing(made)))
        yield hosts[0], hosts[1], ranks[0], ranks[1]


def here(host: KeeperHost) -> HostAddress:
    """Where its keeper says that it listens."""
    with contextlib.closing(host.client()):  # answers when the keeper is ready
        record = read_record(host.place.keeper_json)
    return HostAddress(host.config.host, "", record.address)


def copies(host: KeeperHost, rank: int) -> dict[State, bytes]:
    """The images of another host's rank there, by state, read as any peer would."""
    store = PeerStore(here(host).address, "memory", Token(TOKEN), 20.0)
    with contextlib.closing(store):
        keys = {info.key: info.size_bytes for info in store.list("states/")}
        found = {}
        for step in range(1, 30):
            for generation in (1, 2):
                state = State(generation, step)
                key = image_key(state, rank)
                if key in keys:
                    found[state] = store.get(key, keys[key])
        return found


def test_images_cross_and_both_keepers_may_die(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (first, second, one, two):
        one.seal(1, 0)
        two.seal(1, 0)
        eventually(lambda: one.seat.acked == two.seat.acked == 1, "both are acked")
        second.kill()
        second.start()
        assert State(1, 1) in copies(second, 0), "the copy was adopted"
        one.seal(2, 1)
        eventually(lambda: one.seat.acked == 2, "the new keeper takes copies")
        first.kill()
        first.start()
        one.seal(3, 2)
        eventually(lambda: one.seat.acked == 3, "the new keeper sends copies")
        kept = copies(second, 0)
        assert kept[State(1, 3)] == bytes(one.slot(2).image[: len(kept[State(1, 3)])])
        assert first.events("unprotected") == second.events("wrong_bytes") == []


def test_a_keeper_that_slept_through_a_change_of_generation_changes_nothing(
    tmp_path: Path,
) -> None:
    with two_hosts(tmp_path) as (first, second, one, two):
        one.seal(1, 0)
        two.seal(1, 0)
        eventually(lambda: one.seat.acked == two.seat.acked == 1, "both are acked")
        assert first.last is not None
        first.last.send_signal(signal.SIGSTOP)
        try:
            one.capture(2, 1)  # a rank that does not know either
            inventory = second.take_inventory(2, 2)
            assert {(copy.state, copy.tier) for copy in inventory.copies} >= {
                (State(1, 1), Tier.MEMORY),
                (State(1, 1), Tier.PEER),
            }
            before = copies(second, 0)
        finally:
            first.last.send_signal(signal.SIGCONT)
        eventually(lambda: bool(first.events("superseded")), "the zombie learns of it")
        assert copies(second, 0) == before
        assert one.seat.acked == 1

"""Two keepers: what one seals the other keeps, through deaths and generations of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.keepers import KeeperHost, KitRank, data_of, eventually, keeper_host, make_structure

from keepstep.ckpt.inventory import Copy, HostAddress
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.tiers import Tier, Tiers

pytestmark = pytest.mark.ranks

STRUCTURE = make_structure(2)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[KeeperHost]]:
    with (
        keeper_host(tmp_path, "h0", tiers=Tiers(peers=1)) as one,
        keeper_host(tmp_path, "h1", tiers=Tiers(peers=1)) as other,
    ):
        one.start()
        other.start()
        yield [one, other]


@contextlib.contextmanager
def entered(
    hosts: list[KeeperHost], generation: int = 1, base: State | None = None
) -> Iterator[list[KitRank]]:
    """Rank 0 on h0, rank 1 on h1."""
    addresses = []
    for host in hosts:
        with contextlib.closing(host.client()) as client:
            addresses.append(client.take_inventory(generation, generation).address)
    made = [
        KitRank(
            host,
            STRUCTURE,
            rank,
            generation=generation,
            term=generation,
            base=base,
            hosts=(0, 1),
            addresses=[HostAddress(f"h{at}", "", each) for at, each in enumerate(addresses)],
        )
        for rank, host in enumerate(hosts)
    ]
    with contextlib.ExitStack() as stack:
        for each in made:
            stack.callback(each.close)
        yield made


def copies(host: KeeperHost, generation: int, tier: Tier) -> list[Copy]:
    taken = host.take_inventory(generation, generation).copies
    return [copy for copy in taken if copy.tier is tier]


def peer_slot(host: KeeperHost, pool: Pool, state: State) -> Slot:
    (slot,) = [
        slot
        for slot in pool.slots
        if slot.status is SlotStatus.SEALED and not slot.is_own and slot.state == state
    ]
    return slot


def step_all(ranks: list[KitRank], step: int, position: int = 0) -> None:
    """All ranks capture a step, and wait until their peers have it, too."""
    for rank in ranks:
        rank.seal(step, position)
    for rank in ranks:
        eventually(lambda rank=rank: rank.seat.acked >= step, f"rank {rank.rank} acked {step}")


def test_memory_for_peers_is_there_before_the_first_step(hosts: list[KeeperHost]) -> None:
    with entered(hosts) as ranks:
        for rank in ranks:
            assert [slot.status for slot in rank.pool.slots] == [SlotStatus.FREE] * 6
            assert all(slot.capacity_bytes >= rank.header.size_bytes for slot in rank.pool.slots)


def test_what_one_host_seals_the_other_keeps(hosts: list[KeeperHost]) -> None:
    with entered(hosts) as ranks:
        step_all(ranks, 1)
        state = State(1, 1)
        for rank, other in ((0, 1), (1, 0)):
            (copy,) = copies(hosts[other], 1, Tier.PEER)
            assert (copy.state, copy.record.rank) == (state, rank)
            slot = peer_slot(hosts[other], ranks[other].pool, state)
            begin, end = ranks[rank].header.header_bytes, ranks[rank].header.size_bytes
            assert bytes(slot.image[begin:end]) == data_of(state, rank, end - begin)
            assert ranks[other].client.describe(state).values["cursor"] == 1


def test_a_keeper_that_was_killed_still_has_its_peers_images_and_takes_more(
    hosts: list[KeeperHost],
) -> None:
    with entered(hosts) as ranks:
        step_all(ranks, 1, 0)
        address = hosts[1].take_inventory(1, 1).address
        hosts[1].kill()
        hosts[1].start()
        assert hosts[1].take_inventory(1, 1).address == address
        assert [copy.state for copy in copies(hosts[1], 1, Tier.PEER)] == [State(1, 1)]
        step_all(ranks, 2, 1)
        states = {copy.state for copy in copies(hosts[1], 1, Tier.PEER)}
        assert states == {State(1, 1), State(1, 2)}


def test_a_new_generation_sends_more_and_leaves_copies_of_its_base_alone(
    hosts: list[KeeperHost],
) -> None:
    with entered(hosts) as ranks:
        step_all(ranks, 1, 0)
        step_all(ranks, 2, 1)
        step_all(ranks, 3, 2)
    base = State(1, 2)
    with entered(hosts, 2, base) as ranks:
        kept = [peer_slot(host, rank.pool, base) for host, rank in zip(hosts, ranks, strict=True)]
        for rank in ranks:
            present = {slot.state for slot in rank.pool.slots if slot.status is SlotStatus.SEALED}
            assert present == {State(1, 1), base}
            assert len(rank.pool.slots) == 6
        step_all(ranks, 3, 0)
        assert all(slot.status is SlotStatus.SEALED and slot.state == base for slot in kept)
        ranks[0].seat.agreed_acked = 3
        eventually(lambda: not kept[0].pinned, "the base is let go")
        assert kept[1].pinned
        ranks[0].seal(4, 1)  # the other host hears of it with the next image
        for slot in kept:
            eventually(lambda slot=slot: not slot.pinned, "the base is let go")
        ranks[1].seat.agreed_acked = 3
        ranks[1].seal(4, 1)
        step_all(ranks, 5, 2)
        for rank in ranks:
            rank.seat.agreed_acked = 5
        step_all(ranks, 6, 0)
        assert all(len(rank.pool.slots) == 6 for rank in ranks)


def test_what_a_peer_has_not_got_yet_it_gets_from_a_successor(hosts: list[KeeperHost]) -> None:
    with entered(hosts) as ranks:
        hosts[1].kill()
        ranks[0].seal(1)
        hosts[0].kill()
        assert ranks[0].seat.acked == -1
        for host in hosts:
            host.start()
        eventually(lambda: ranks[0].seat.acked == 1, "acked at last")
        assert [copy.state for copy in copies(hosts[1], 1, Tier.PEER)] == [State(1, 1)]

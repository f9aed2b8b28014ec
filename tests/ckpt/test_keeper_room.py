"""How much memory a keeper takes: refused with numbers, two slots where it is short, given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.keepers import (
    WAIT_S,
    KeeperHost,
    KitRank,
    keeper_host,
    make_structure,
    rank_process,
)
from tests.kit.mounts import small_tmpfs

from keepstep.ckpt.keeper_errors import SlotsTaken
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool_errors import PoolTooLarge
from keepstep.ckpt.pool_table import SlotStatus

pytestmark = pytest.mark.ranks

STRUCTURE = make_structure(1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[KeeperHost]:
    with keeper_host(tmp_path) as made:
        yield made


@pytest.fixture
def rank(host: KeeperHost) -> Iterator[KitRank]:
    host.start()
    with contextlib.closing(KitRank(host, STRUCTURE)) as made:
        yield made


@pytest.mark.parametrize(("size", "slots"), [("9m", 2), ("12m", 3)])
def test_where_memory_is_short_a_rank_has_two_slots_and_it_is_told(
    tmp_path: Path, size: str, slots: int
) -> None:
    with (
        small_tmpfs(tmp_path / "small", f"size={size}") as place,
        keeper_host(tmp_path, shm_dir=str(place / "shm")) as host,
    ):
        host.start()
        with contextlib.closing(KitRank(host, STRUCTURE)) as rank:
            assert len(rank.entered.slots) == slots
            rank.seal(1, 0)
            rank.seal(2, 1)
        assert len(host.events("memory_short")) == 3 - slots


def test_too_little_memory_is_refused_with_numbers_before_anything_steps(tmp_path: Path) -> None:
    with (
        small_tmpfs(tmp_path / "small", "size=6m") as place,
        keeper_host(tmp_path, shm_dir=str(place / "shm")) as host,
    ):
        host.start()
        with pytest.raises(PoolTooLarge, match=r"rank 0 needs a slot of 3,41\d,\d+ bytes .* only"):
            KitRank(host, STRUCTURE)


def test_memory_that_an_older_rank_still_has_is_asked_for_by_its_pid(tmp_path: Path) -> None:
    with (
        small_tmpfs(tmp_path / "small", "size=16m") as place,
        keeper_host(tmp_path, shm_dir=str(place / "shm")) as host,
    ):
        host.start()
        with rank_process(host, "seal") as process:
            with pytest.raises(SlotsTaken, match=rf"\(pid {process.pid}\) still lives and owns"):
                KitRank(host, STRUCTURE, generation=2, term=2)
            process.kill()
            process.wait(WAIT_S)
        with contextlib.closing(KitRank(host, STRUCTURE, generation=2, term=2)) as rank:
            assert len(rank.entered.slots) == 3
            rank.seal(1)


def test_memory_of_an_older_layout_is_given_back(host: KeeperHost) -> None:
    host.start()
    with contextlib.closing(KitRank(host, STRUCTURE)) as rank:
        rank.seal(1)
        before_bytes = used_bytes(host)
    larger = make_structure(1, 9 << 20)
    with contextlib.closing(KitRank(host, larger, generation=2, term=2)) as rank:
        assert [slot.status for slot in rank.pool.slots].count(SlotStatus.ABSENT) == 3
        rank.seal(1)
    smaller = make_structure(1, 1 << 20)
    with contextlib.closing(KitRank(host, smaller, generation=3, term=3)) as rank:
        rank.seal(1)
    assert used_bytes(host) <= before_bytes


def test_a_rank_goes_on_with_a_larger_structure_in_its_generation(
    host: KeeperHost, rank: KitRank
) -> None:
    rank.seal(1)
    with contextlib.closing(KitRank(host, make_structure(1, 9 << 20))) as grown:
        assert grown.entered.seat == rank.entered.seat
        assert set(grown.entered.slots).isdisjoint(rank.entered.slots)
        grown.seal(2)
        states = [copy.state for copy in host.take_inventory(1, 1).copies]
        assert states == [State(1, 1), State(1, 2)]


def used_bytes(host: KeeperHost) -> int:
    return host.place.pool.stat().st_blocks * 512

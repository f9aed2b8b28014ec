"""A capture that its keeper cannot seal is known to all ranks, and no tier waits for it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.kit.keepers import KitRank, eventually, keeper_host, make_structure

from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.tiers import Due


@pytest.mark.ranks
def test_the_seat_says_that_a_capture_is_lost_before_a_newer_one_is_sealed(tmp_path: Path) -> None:
    with keeper_host(tmp_path) as host:
        host.start()
        with contextlib.closing(KitRank(host, make_structure(1))) as rank:
            rank.seal(3, 0)
            assert rank.seat.lost == -1
            broken = rank.begin(4, 1, Due.DISK)
            broken.captured(b'{"a": NaN}', rank.header.size_bytes)
            rank.ringer.ring()
            eventually(lambda: broken.status is SlotStatus.FREE, "freed")
            seat = rank.seat
            eventually(lambda: seat.failures == 1, "counted")
            assert (seat.lost, seat.drained, seat.sealed) == (4, 4, 3)
            rank.seal(5, 2)
            assert (seat.lost, seat.sealed) == (4, 5)


@pytest.mark.ranks
def test_a_sealed_image_that_a_new_keeper_finds_broken_is_lost_too(tmp_path: Path) -> None:
    with keeper_host(tmp_path) as host:
        host.start()
        with contextlib.closing(KitRank(host, make_structure(1))) as rank:
            rank.seal(3, 0)
            slot = rank.seal(4, 1, Due.DISK)
            host.kill()
            rank.seat.drained = 2  # as if the disk had not been through with it
            slot.image[rank.header.size_bytes - 1] ^= 1
            host.start()
            eventually(lambda: rank.seat.lost == 4, "told")
            assert (rank.seat.drained, rank.seat.failures) == (4, 1)
            assert slot.status is SlotStatus.SEALED  # its rank is alive: left alone
            rank.seal(5, 2)

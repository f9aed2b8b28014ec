"""Where a run begins, with real keepers and ranks: from whatever is left of the newest state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.kit.begins import Came, begin_again, run_steps, site, without
from tests.kit.keepers import KeeperHost, eventually
from tests.kit.ranks import run_ranks

from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_table import SlotStatus

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(180)]

TWO_HOSTS = ("h0", "h0", "h1", "h1")
STATE_BYTES = 1_536 * 1_024 * 4 + 700_000 * 4


def damage(keeper: KeeperHost, state: State, rank: int, place: int = 5_000_000) -> int:
    """Flip a byte of every copy of an image in a host's memory, or its last byte if it is shorter.

    How many copies there were."""
    count = 0
    with Pool.open(keeper.place.pool) as pool:
        for slot in pool.slots:
            if slot.status is not SlotStatus.SEALED:
                continue
            if (slot.state, slot.rank) == (state, rank):
                slot.image[min(place, slot.size_bytes - 1)] ^= 1
                count += 1
    return count


def agreed(came: list[Came]) -> Came:
    """What all ranks say alike; each has the state that it says."""
    assert len({(one.base, one.generation, one.passed_over) for one in came}) == 1
    for one in came:
        assert one.shows == (0 if one.base is None else one.base.step)
    return came[0]


def test_a_run_goes_on_from_its_own_memory_without_a_commit(tmp_path: Path) -> None:
    with site(tmp_path, TWO_HOSTS) as (place, _):
        first = agreed(run_ranks(4, run_steps, place, (2, 2), (1, 2, 3), 4))
        assert (first.base, first.generation) == (None, 1)
        second = agreed(run_ranks(4, begin_again, place, (2, 2)))
    assert second.base == State(1, 3)
    assert not second.is_committed
    assert second.passed_over == ()
    # Each host needs all of the state, has half of it itself and the other half from its peer.
    assert set(second.read_bytes) <= {"memory", "peer"}
    assert 2 * STATE_BYTES <= sum(second.read_bytes.values()) <= 1.05 * 2 * STATE_BYTES


def test_a_lost_host_s_part_comes_from_its_peer_s_memory_in_another_layout(
    tmp_path: Path,
) -> None:
    with site(tmp_path, TWO_HOSTS) as (place, keepers):
        run_ranks(4, run_steps, place, (2, 2), (1, 2, 3), 4)
        keepers["h0"].kill()
        shutil.rmtree(keepers["h0"].place.path)
        left = without(place, "h0", ("h1", "h1"))
        second = agreed(run_ranks(2, begin_again, left, (1, 2)))
    assert second.base == State(1, 3)
    assert set(second.read_bytes) == {"memory", "peer"}
    assert sum(second.read_bytes.values()) <= 1.05 * STATE_BYTES


def test_a_host_that_is_no_member_any_more_is_asked_all_the_same(tmp_path: Path) -> None:
    with site(tmp_path, ("h0", "h1")) as (place, keepers):
        run_ranks(2, run_steps, place, (1, 2), (1, 2, 3), 2)
        damage_count = damage(keepers["h1"], State(1, 3), 0)
        assert damage_count == 1  # so that only h0 has it right
        eventually(lambda: (tmp_path / "store" / "hosts" / "h0.json").exists(), "h0's hint")
        left = without(place, "h0", ("h1",))
        (second,) = run_ranks(1, begin_again, left, (1, 1))
    assert second.base == State(1, 3)
    assert second.shows == 3
    ((reason, details),) = second.told("copy_passed_over")
    assert "peer of h1" in reason
    assert details["tensor"] in ("model/matrix", "model/vector")
    assert (details["tier"], details["host"], details["image"]) == ("peer", "h1", 0)
    assert details["offset"] % (1 << 20) == 4096


def test_a_wrong_byte_in_own_memory_comes_from_the_peer_and_is_told(tmp_path: Path) -> None:
    with site(tmp_path, TWO_HOSTS) as (place, keepers):
        run_ranks(4, run_steps, place, (2, 2), (1, 2, 3), 4)
        assert damage(keepers["h0"], State(1, 3), 0) == 1
        came = run_ranks(4, begin_again, place, (2, 2))
    assert agreed(came).base == State(1, 3)
    told = [details for one in came for _, details in one.told("copy_passed_over")]
    assert [(one["tier"], one["host"], one["image"]) for one in told] == [("memory", "h0", 0)]


def test_what_is_wrong_everywhere_sends_all_ranks_one_state_back_together(
    tmp_path: Path,
) -> None:
    with site(tmp_path, TWO_HOSTS) as (place, keepers):
        run_ranks(4, run_steps, place, (2, 2), (1, 2, 3), 4)
        assert damage(keepers["h0"], State(1, 3), 1) == 1
        assert damage(keepers["h1"], State(1, 3), 1) == 1
        second = agreed(run_ranks(4, begin_again, place, (2, 2)))
    assert second.base == State(1, 2)
    (passed,) = second.passed_over
    assert "restoring step 3 of generation 1 failed" in passed
    assert "data chunk" in passed


def test_a_step_that_only_some_ranks_finished_is_not_gone_on_from(tmp_path: Path) -> None:
    with site(tmp_path, TWO_HOSTS) as (place, _):
        run_ranks(4, run_steps, place, (2, 2), (1, 2, 3), 2)
        came = run_ranks(4, begin_again, place, (2, 2))
    second = agreed(came)
    assert second.base == State(1, 2)
    assert second.passed_over == ()
    ((reason, _),) = came[0].told("snapshot_incomplete")
    assert "ranks without an image anywhere: 2, 3" in reason


def test_a_state_gone_on_from_can_be_gone_on_from_again(tmp_path: Path) -> None:
    """The base of a generation that died before its first capture is still there."""
    with site(tmp_path, ("h0", "h0")) as (place, _):
        run_ranks(2, run_steps, place, (1, 2), (1, 2, 3), 2)
        for generation in (2, 3):
            again = agreed(run_ranks(2, begin_again, place, (1, 2)))
            assert (again.base, again.generation) == (State(1, 3), generation)
        third = agreed(run_ranks(2, run_steps, place, (1, 2), (4, 5), 2))
        assert third.base == State(1, 3)
        last = agreed(run_ranks(2, begin_again, place, (2, 1)))
    assert last.base == State(4, 5)

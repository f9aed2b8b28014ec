"""Where a run begins, with real keepers and ranks: from whatever is left of the newest state."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.begins import (
    Came,
    Site,
    Toy,
    begin_again,
    begin_here,
    came,
    run_steps,
    site,
    without,
)
from tests.kit.keepers import TOKEN, KeeperHost, eventually
from tests.kit.ranks import run_ranks

from keepstep.ckpt.agree import all_gather_bytes
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import Manifest, State
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.tiers import Due, TierPolicy, Tiers

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(180)]

TWO_HOSTS = ("h0", "h0", "h1", "h1")
ON_DISK = Tiers(peers=0, disk=TierPolicy(keep=3), store=TierPolicy())
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


def agreed(ranks: list[Came]) -> Came:
    """What all ranks say alike; each has the state that it says."""
    assert len({(one.base, one.generation, one.passed_over) for one in ranks}) == 1
    for one in ranks:
        assert one.shows == (0 if one.base is None else one.base.step)
    return ranks[0]


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


def test_an_uncommitted_state_after_which_nothing_is_left_to_do_is_not_taken(
    tmp_path: Path,
) -> None:
    """Else the run would end at once, and its last state would never be in the store."""
    with site(tmp_path, ("h0", "h0")) as (place, _):
        run_ranks(2, run_steps, place, (1, 2), (1, 2, 3), 2)
        ending = dataclasses.replace(place, last_step=3)
        second = agreed(run_ranks(2, begin_again, ending, (1, 2)))
    assert second.base == State(1, 2)
    assert second.passed_over == ()


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
    assert (details["tier"], details["of_host"], details["image"]) == ("peer", "h1", 0)
    assert details["offset"] % (1 << 20) == 4096


def test_a_wrong_byte_in_own_memory_comes_from_the_peer_and_is_told(tmp_path: Path) -> None:
    with site(tmp_path, TWO_HOSTS) as (place, keepers):
        run_ranks(4, run_steps, place, (2, 2), (1, 2, 3), 4)
        assert damage(keepers["h0"], State(1, 3), 0) == 1
        all_came = run_ranks(4, begin_again, place, (2, 2))
    assert agreed(all_came).base == State(1, 3)
    told = [details for one in all_came for _, details in one.told("copy_passed_over")]
    assert [(one["tier"], one["of_host"], one["image"]) for one in told] == [("memory", "h0", 0)]


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
        all_came = run_ranks(4, begin_again, place, (2, 2))
    second = agreed(all_came)
    assert second.base == State(1, 2)
    assert second.passed_over == ()
    ((reason, _),) = all_came[0].told("snapshot_incomplete")
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


def test_hosts_that_lost_their_memory_go_on_from_their_disks(tmp_path: Path) -> None:
    with site(tmp_path, TWO_HOSTS, ON_DISK, has_disk=True) as (place, keepers):
        due = dataclasses.replace(place, due=Due.DISK)
        run_ranks(4, run_steps, due, (2, 2), (1, 2, 3), 4)
        for keeper in keepers.values():
            keeper.kill()
            shutil.rmtree(keeper.place.path)
            keeper.start()
        whole = agreed(run_ranks(4, begin_again, place, (2, 2)))
        assert whole.base == State(1, 3)
        assert set(whole.read_bytes) == {"disk"}
        # Its first MiB of data is copied nowhere else, and no newer state has been captured since.
        image = tmp_path / "disk-h0" / image_key(State(1, 3), 0)
        data = bytearray(image.read_bytes())
        data[5_000] ^= 1
        image.write_bytes(bytes(data))
        for keeper in keepers.values():  # without an image, they may have ended by themselves
            keeper.kill()
            keeper.start()
        older = agreed(run_ranks(4, begin_again, place, (2, 2)))
    assert older.base == State(1, 2)
    assert len(older.passed_over) == 1


def test_a_keeper_that_dies_while_ranks_begin_is_waited_for(tmp_path: Path) -> None:
    with site(tmp_path, ("h0", "h0")) as (place, keepers):
        run_ranks(2, run_steps, place, (1, 2), (1, 2, 3), 2)
        keeper = keepers["h0"]
        found = run_ranks(2, begin_and_lose_the_keeper, place, (1, 2), _last_pid(keeper))
        assert agreed(found).base == State(1, 3)


def _last_pid(keeper: KeeperHost) -> int:
    assert keeper.last is not None
    return keeper.last.pid


def begin_and_lose_the_keeper(
    rank: int, world: int, place: Site, sizes: tuple[int, int], pid: int
) -> Came:
    """As `begin_again`, but rank 0 kills the keeper while the candidate is looked at."""
    toy = Toy(*sizes, rank)
    started: list[subprocess.Popen[bytes]] = []

    def kill_and_start(manifest: Manifest) -> str:
        os.kill(pid, signal.SIGKILL)
        config = next(Path(place.store).parent.glob("h0-config.json"))
        environment = {**os.environ, "KEEPSTEP_TOKEN": TOKEN}
        command = [sys.executable, "-m", "keepstep.ckpt.keeper", str(config)]
        started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        return ""

    with contextlib.ExitStack() as stack:
        begun, _, events = begin_here(rank, toy, place, stack, refuse=kill_and_start, timeout_s=20)
        all_gather_bytes(None, b"over")
    for process in started:
        process.kill()
        process.wait()
    return came(begun, toy, events)

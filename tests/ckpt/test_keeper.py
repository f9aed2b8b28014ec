"""The keeper as a process: what it seals, what it adopts, whom it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from tests.kit.keepers import (
    WAIT_S,
    KeeperHost,
    KitRank,
    data_of,
    eventually,
    keeper_host,
    make_structure,
    rank_process,
)

from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.errors import NoSuchState
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_errors import KeeperGone, Refusal, SlotsTaken, Stale
from keepstep.ckpt.keeper_record import read_record
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.process import this_process
from keepstep.ckpt.tiers import Tier

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


def states_in(host: KeeperHost, generation: int = 1, term: int = 1) -> list[State]:
    return [copy.state for copy in host.take_inventory(generation, term).copies]


def test_what_a_rank_captured_is_sealed_and_is_a_safetensors_file(
    host: KeeperHost, rank: KitRank, tmp_path: Path
) -> None:
    slot = rank.seal(4)
    file = tmp_path / "image.safetensors"
    file.write_bytes(slot.image[: slot.size_bytes])
    with safe_open(file, "np") as image:
        assert image.metadata()["state"] == "g000001/s000000000004"
        assert sorted(image.keys()) == ["model/b", "model/w"]
    begin, end = rank.header.header_bytes, rank.header.size_bytes
    assert file.read_bytes()[begin:] == data_of(State(1, 4), 0, end - begin)
    eventually(lambda: (rank.seat.sealed, rank.seat.acked) == (4, 4), "the seat says so")


def test_the_keeper_looks_without_a_ring_too(host: KeeperHost, rank: KitRank) -> None:
    rank.ringer.close()
    slot = rank.capture(4)
    eventually(lambda: slot.status is SlotStatus.SEALED, "sealed", 5)


def test_an_inventory_names_what_is_sealed_and_describe_says_what_it_is(
    host: KeeperHost, rank: KitRank
) -> None:
    rank.seal(1, 0)
    rank.capture(2, 1)  # sealed before the inventory is made
    inventory = host.take_inventory(2, 2)
    assert [(copy.state, copy.tier) for copy in inventory.copies] == [
        (State(1, 1), Tier.MEMORY),
        (State(1, 2), Tier.MEMORY),
    ]
    assert {copy.record.size_bytes for copy in inventory.copies} == {rank.header.size_bytes}
    assert (inventory.host, inventory.generation, inventory.term) == ("h0", 2, 2)
    description = rank.client.describe(State(1, 2))
    assert description.values == {"cursor": 2, "name": "step 2"}
    assert description.plan_digest == STRUCTURE.digest
    with pytest.raises(NoSuchState, match=r"in memory it has g000001/s000000000001, g000001/"):
        rank.client.describe(State(1, 3))


def test_a_successor_adopts_all_sealed_images_and_seals_what_was_captured_meanwhile(
    host: KeeperHost, rank: KitRank
) -> None:
    slots = [rank.seal(1, 0), rank.seal(2, 1)]
    host.kill()
    slots.append(rank.capture(3, 2))
    host.start()
    eventually(lambda: slots[2].status is SlotStatus.SEALED, "sealed by the successor")
    assert states_in(host) == [State(1, 1), State(1, 2), State(1, 3)]
    assert all(rank.holds(slot, State(1, 1 + i)) for i, slot in enumerate(slots))
    eventually(lambda: (rank.seat.sealed, rank.seat.acked) == (3, 3), "the seat says so")
    assert host.events("adopted")[0]["states"] == [[1, 1], [1, 2]]
    assert host.events("image_corrupt") == []


@pytest.mark.slow
def test_a_keeper_killed_at_any_moment_loses_nothing_that_was_sealed(
    host: KeeperHost, rank: KitRank
) -> None:
    for turn in range(6):
        step = 10 * turn + 1
        slot = rank.seal(step, turn % 2)
        other = rank.capture(step + 1, 2)
        time.sleep(turn * 0.004)  # in the middle of sealing, some time or other
        host.kill()
        host.start()
        wait_sealed(other)
        states = states_in(host)
        assert State(1, step) in states
        assert State(1, step + 1) in states
        assert rank.holds(slot, State(1, step))
        assert rank.holds(other, State(1, step + 1))
    assert host.events("image_corrupt") == []


@pytest.mark.slow
def test_a_keeper_killed_while_a_rank_enters_lets_it_in_at_last_beside_its_base(
    host: KeeperHost,
) -> None:
    base: State | None = None
    for generation in range(1, 5):
        rank = None
        host.start()
        dying = threading.Timer(0.012 * generation, host.kill)
        dying.start()
        while rank is None:
            try:
                if base is not None:
                    assert base in states_in(host, generation, generation)
                rank = KitRank(host, STRUCTURE, generation=generation, term=generation, base=base)
            except KeeperGone:
                dying.join()
                host.start()
        dying.join()
        if host.last is not None and host.last.poll() is not None:
            host.start()
        with contextlib.closing(rank):
            assert len(rank.entered.slots) == 3
            rank.seal(generation)
        base = State(generation, generation)
        host.end()
    assert host.events("image_corrupt") == []


def wait_sealed(slot: Slot) -> None:
    eventually(lambda: slot.status is SlotStatus.SEALED, "sealed at last")


def flip(pool: Pool, index: int, offset: int) -> None:
    """Change one byte of an image."""
    pool.slots[index].image[offset] ^= 1


def test_a_flipped_byte_is_found_and_told_with_tensor_rank_tier_and_offset(
    host: KeeperHost,
) -> None:
    host.start()
    with (
        rank_process(host, "seal") as process,
        contextlib.closing(Pool.open(host.place.pool)) as pool,
    ):
        host.kill()
        process.kill()
        process.wait(WAIT_S)
        item_at = pool.slots[0].size_bytes - 100
        flip(pool, 0, item_at)
        host.start()
        assert states_in(host) == []
        (event,) = host.events("image_corrupt")
        header_bytes = 4096
        assert event["tensor"] in ("model/b", "model/w")
        assert (event["rank"], event["tier"], event["step"]) == (0, "memory", 7)
        chunk = (item_at - header_bytes) // CHUNK_BYTES
        assert event["offset"] == header_bytes + chunk * CHUNK_BYTES
        assert pool.slots[0].status is SlotStatus.FREE


@pytest.mark.parametrize("offset", [0, 40, 700, 4095])
def test_a_flipped_byte_of_a_header_is_found_and_a_living_ranks_slot_left_alone(
    host: KeeperHost, rank: KitRank, offset: int
) -> None:
    slot = rank.seal(1)
    rank.seal(2, 1)
    host.kill()
    flip(rank.pool, slot.index, offset)
    host.start()
    assert states_in(host) == [State(1, 2)]
    assert len(host.events("image_corrupt")) == 1
    assert slot.status is SlotStatus.SEALED
    rank.seal(3, 0)
    assert states_in(host) == [State(1, 2), State(1, 3)]


def test_a_flipped_byte_of_the_values_is_found(host: KeeperHost, rank: KitRank) -> None:
    slot = rank.seal(1)
    rank.seal(2, 1)
    host.kill()
    with host.place.pool.open("r+b") as file:
        file.seek(slot.values_offset_bytes + len(b'{"cursor":'))
        assert file.read(1) == b"1"
        file.seek(-1, 1)
        file.write(b"9")
    host.start()
    assert states_in(host) == [State(1, 2)]
    assert "values: expected checksum" in host.events("image_corrupt")[0]["reason"]


def test_a_slot_that_a_living_rank_fills_is_left_alone_and_a_dead_ones_is_freed(
    host: KeeperHost,
) -> None:
    host.start()
    with (
        rank_process(host, "begin") as process,
        contextlib.closing(Pool.open(host.place.pool)) as pool,
    ):
        host.kill()
        host.start()
        host.take_inventory(1, 1)  # adoption is done
        assert pool.slots[0].status is SlotStatus.FILLING
        assert pool.slots[0].owner is not None
        process.kill()
        eventually(lambda: pool.slots[0].status is SlotStatus.FREE, "the slot is free again")
        eventually(lambda: pool.slots[0].owner is None, "nobody owns it")
        assert host.events("capture_lost")[0]["rank"] == 0


def test_what_a_rank_captured_before_it_died_without_a_keeper_is_sealed(host: KeeperHost) -> None:
    host.start()
    with (
        rank_process(host, "seal") as process,
        contextlib.closing(Pool.open(host.place.pool)) as pool,
    ):
        host.kill()
        slot = pool.slots[1]
        owner = slot.owner
        assert owner is not None
        slot.claim(owner.writer, 0, State(1, 8), pool.slots[0].due)
        begin = 4096
        slot.image[begin : pool.slots[0].size_bytes] = bytes(pool.slots[0].size_bytes - begin)
        slot.captured(b"{}", pool.slots[0].size_bytes)
        process.kill()
        process.wait(WAIT_S)
        host.start()
        assert states_in(host) == [State(1, 7), State(1, 8)]


def test_a_second_keeper_is_refused_and_names_the_first(host: KeeperHost, rank: KitRank) -> None:
    first = host.last
    assert first is not None
    second = host.start(is_waited_for=False)
    assert second.wait(WAIT_S) == 3
    assert f"has a living keeper, pid {first.pid}" in host.output()
    rank.seal(1)


def test_a_promise_is_kept_by_a_successor_of_a_keeper_that_died_with_the_answer(
    host: KeeperHost, rank: KitRank
) -> None:
    rank.seal(1)
    host.take_inventory(4, 9)
    host.kill()
    host.start()
    with contextlib.closing(host.client()) as client:
        for generation, term in ((3, 9), (4, 8), (1, 1)):
            with pytest.raises(Stale, match="a newer run has taken over"):
                client.take_inventory(generation, term)
        with pytest.raises(Stale):
            client.enter(rank.enter)
        assert client.take_inventory(4, 9).generation == 4
    with pytest.raises(Stale, match="promised generation 4"):
        rank.capture(2, 1)


def test_a_promise_outlives_the_pool(host: KeeperHost, rank: KitRank) -> None:
    host.take_inventory(4, 9)
    host.kill()
    host.place.pool.unlink()
    host.start()
    with contextlib.closing(Pool.open(host.place.pool)) as pool:
        assert pool.header.fence == 4
    with contextlib.closing(host.client()) as client, pytest.raises(Stale):
        client.enter(rank.enter)


def test_a_promise_is_on_record_before_it_is_answered(host: KeeperHost, rank: KitRank) -> None:
    for generation in range(2, 12):
        host.take_inventory(generation, generation + 1)
        record = read_record(host.place.keeper_json)
        assert (record.generation, record.term) == (generation, generation + 1)


def test_what_a_superseded_rank_captures_is_not_sealed(host: KeeperHost, rank: KitRank) -> None:
    rank.seal(1)
    slot = rank.begin(2, 1)
    host.take_inventory(2, 2)
    slot.captured(b"{}", rank.header.size_bytes)
    rank.ringer.ring()
    time.sleep(0.3)
    assert slot.status is SlotStatus.CAPTURED
    assert states_in(host, 2, 2) == [State(1, 1)]


def test_a_new_generation_gets_a_slot_at_once_and_leaves_its_base_alone(
    host: KeeperHost,
) -> None:
    host.start()
    with rank_process(host, "seal") as process:
        process.kill()
        process.wait(WAIT_S)
    base = State(1, 7)
    assert states_in(host, 2, 2) == [base]
    with contextlib.closing(KitRank(host, STRUCTURE, generation=2, term=2, base=base)) as rank:
        assert len(rank.entered.slots) == 3
        assert len(rank.pool.slots) == 3
        assert rank.slot(0).status is SlotStatus.FREE
        (kept,) = [slot for slot in rank.pool.slots if slot.status is SlotStatus.SEALED]
        assert kept.index == rank.entered.slots[2]
        assert kept.pinned
        rank.seal(8, 0)
        assert states_in(host, 2, 2) == [base, State(2, 8)]
        assert rank.holds(kept, base)
        rank.seat.agreed_acked = 8
        eventually(lambda: not kept.pinned, "the base is let go")


def test_a_rank_of_an_older_generation_keeps_its_slots_while_it_lives(host: KeeperHost) -> None:
    host.start()
    with (
        rank_process(host, "begin") as process,
        contextlib.closing(KitRank(host, STRUCTURE, generation=2, term=2)) as rank,
    ):
        old = [slot for slot in rank.pool.slots if slot.index not in rank.entered.slots]
        assert len(old) == 3
        assert [slot.status for slot in old].count(SlotStatus.FILLING) == 1
        assert {slot.owner.writer.pid for slot in old if slot.owner} == {process.pid}
        rank.seal(1)
        process.kill()
        eventually(lambda: all(slot.owner is None for slot in old), "they are nobody's")


def test_a_rank_that_asks_again_gets_the_same_and_another_process_is_refused(
    host: KeeperHost, rank: KitRank
) -> None:
    rank.seal(1)
    assert rank.client.enter(rank.enter) == rank.entered
    assert rank.seat.sealed == 1
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with KeeperClient(host.place.path, WAIT_S) as client:
            ticks = int(psutil.Process(other.pid).create_time())  # not what is asked for
            with pytest.raises(Refusal, match=f"no process {other.pid} that began at tick"):
                client.attach("demo", 0, other.pid, ticks)
            stat = Path(f"/proc/{other.pid}/stat").read_text()
            client.attach("demo", 0, other.pid, int(stat.rpartition(")")[2].split()[19]))
            with pytest.raises(SlotsTaken, match=f"is pid {os.getpid()} already"):
                client.enter(rank.enter)
        other.kill()


def test_a_stranger_to_the_job_and_a_wrong_header_are_refused(
    host: KeeperHost, rank: KitRank
) -> None:
    me = this_process()
    with KeeperClient(host.place.path, WAIT_S) as client:
        with pytest.raises(Refusal, match="serves job 'demo', not 'other'"):
            client.attach("other", 0, me.pid, me.ticks)
        with pytest.raises(Refusal, match="came before Attach"):
            client.take_inventory(9, 9)
        client.attach("demo", 1, me.pid, me.ticks)
        with pytest.raises(Refusal, match="cannot enter as rank 0"):
            client.enter(rank.enter)
    with pytest.raises(Refusal, match="is not the one of 4096 bytes"):
        KitRank(host, STRUCTURE, generation=2, term=2, header=rank.header.encoded[:-1])
    assert states_in(host) == []


def test_what_cannot_be_sealed_is_told_and_the_slot_freed(host: KeeperHost, rank: KitRank) -> None:
    short = rank.begin(1, 0)
    short.captured(b"{}", rank.header.size_bytes - 1)
    broken = rank.begin(2, 1)
    broken.captured(b'{"a": NaN}', rank.header.size_bytes)
    rank.ringer.ring()
    eventually(lambda: short.status is SlotStatus.FREE, "freed")
    eventually(lambda: broken.status is SlotStatus.FREE, "freed")
    rank.seal(3, 2)
    assert [event["step"] for event in host.events("capture_refused")] == [1, 2]
    assert rank.seat.failures == 2


def test_asked_to_end_a_keeper_seals_what_was_captured_and_leaves_the_memory(
    host: KeeperHost, rank: KitRank
) -> None:
    assert host.last is not None
    host.last.send_signal(signal.SIGSTOP)
    slot = rank.capture(5)
    host.last.send_signal(signal.SIGTERM)
    host.last.send_signal(signal.SIGCONT)
    assert host.last.wait(WAIT_S) == 0
    assert slot.status is SlotStatus.SEALED
    assert host.place.holder() is None
    with pytest.raises(KeeperGone, match="started again when it dies"):
        rank.client.take_inventory(1, 1)
    host.start()
    assert states_in(host) == [State(1, 5)]


def test_a_patience_after_its_last_rank_nothing_is_left(tmp_path: Path) -> None:
    # Long enough for a process to start on a busy machine and ask, before it is over.
    with keeper_host(tmp_path, patience_s=6.0) as host:
        keeper = host.start()
        with rank_process(host, "seal") as process:
            process.kill()
            process.wait(WAIT_S)
            assert states_in_after_death(host) == [State(1, 7)]
        began_s = time.monotonic()
        assert keeper.wait(WAIT_S) == 0
        assert time.monotonic() - began_s < host.config.patience_s + 10
        assert not Path(host.config.shm_dir).exists()
        assert host.events("keeper_ended")[0]["is_removed"] is True


def states_in_after_death(host: KeeperHost) -> list[State]:
    """Asked by a process of its own, which is gone afterwards: this one would count as a rank."""
    code = (
        "import sys; from pathlib import Path\n"
        "from keepstep.ckpt.keeper_client import KeeperClient;"
        "from keepstep.ckpt.process import this_process; me = this_process();"
        "client = KeeperClient(Path(sys.argv[1]), 20); client.attach('demo', 0, me.pid, me.ticks);"
        "print([[c.state.generation, c.state.step] for c in client.take_inventory(1, 1).copies])"
    )
    command = [sys.executable, "-c", code, str(host.place.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    return [State(*each) for each in json.loads(done.stdout)]


def test_a_keeper_goes_at_once_when_all_its_ranks_have_finished(
    host: KeeperHost, rank: KitRank
) -> None:
    rank.seal(1)
    rank.client.leave(is_finished=True)
    assert host.last is not None
    assert host.last.wait(host.config.patience_s) == 0
    assert not Path(host.config.shm_dir).exists()


def test_a_rank_that_leaves_a_run_that_goes_on_is_waited_for(
    host: KeeperHost, rank: KitRank
) -> None:
    slot = rank.seal(1)
    rank.client.leave(is_finished=False)
    assert slot.status is SlotStatus.SEALED
    assert slot.owner is None
    time.sleep(host.config.patience_s / 2)
    assert host.last is not None
    assert host.last.poll() is None
    assert host.last.wait(WAIT_S) == 0
    assert not Path(host.config.shm_dir).exists()


def test_the_keeper_knows_no_torch() -> None:
    code = (
        "import sys, keepstep.ckpt.keeper, keepstep.ckpt.data_plane, keepstep.ckpt.replicator\n"
        "import keepstep.storage.locate, keepstep.ckpt.receiver, keepstep.ckpt.pool_store\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_a_keeper_with_nothing_to_do_does_nearly_nothing(host: KeeperHost, rank: KitRank) -> None:
    rank.seal(1)
    assert host.last is not None
    process = psutil.Process(host.last.pid)
    time.sleep(0.5)
    before = sum(process.cpu_times()[:2])
    time.sleep(2)
    assert sum(process.cpu_times()[:2]) - before < 0.5  # a busy machine makes it dearer


def test_a_keeper_leaves_no_descriptor_or_thread_behind_after_many_clients(
    host: KeeperHost, rank: KitRank
) -> None:
    assert host.last is not None
    process = psutil.Process(host.last.pid)
    for _ in range(5):
        host.client().close()
    eventually(lambda: process.num_threads() < 40, "threads end")
    time.sleep(0.2)
    before = (process.num_fds(), process.num_threads())
    for _ in range(50):
        host.client().close()
    eventually(
        lambda: process.num_fds() <= before[0] and process.num_threads() <= before[1], "all gone"
    )


def test_a_configuration_that_is_broken_is_said_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"job": "demo", "host": 3}')
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.ckpt.keeper", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "host: expected `str`, found `int`" in done.stderr

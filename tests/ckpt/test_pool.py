"""The pool's file: memory refused with numbers, slots, mappings, processes that see each other."""

from __future__ import annotations

import gc
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from keepstep.ckpt import pool as pool_module
from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.host_memory import HEADROOM_BYTES
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import PAGE_BYTES, Pool
from keepstep.ckpt.pool_errors import PoolDamaged, PoolFull, PoolTooLarge, WrongStatus
from keepstep.ckpt.pool_table import (
    SLOTS_MAX,
    TABLE_BYTES,
    VALUES_BYTES,
    SlotRow,
    SlotStatus,
)
from keepstep.ckpt.process import this_process
from keepstep.ckpt.tiers import Due

MB = 1 << 20
SMALL_BYTES = 8 * MB


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool") as pool:
        yield pool


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "none", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def used_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def write(pool: Pool, index: int, step: int, fill: int, size_bytes: int = 10_000) -> None:
    slot = pool.slots[index]
    slot.claim(this_process(), 0, State(1, step), Due.NOWHERE)
    slot.image[:size_bytes] = bytes([fill]) * size_bytes
    slot.captured(b'{"step":%d}' % step, size_bytes)


def test_a_pool_is_a_private_file_with_an_empty_table(pool: Pool) -> None:
    found = pool.path.stat()
    assert (found.st_mode & 0o777, found.st_size) == (0o600, TABLE_BYTES)
    assert (len(pool.slots), len(pool.seats)) == (0, 64)
    assert not any(seat.is_taken for seat in pool.seats)


def test_descriptors_are_not_inherited_by_programs(pool: Pool) -> None:
    pool.add_slot(MB)
    ours = [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
        and os.path.samefile(f"/proc/self/fd/{name}", pool.path)
    ]
    assert ours
    assert not any(os.get_inheritable(fd) for fd in ours)


def test_a_second_pool_at_the_same_place_is_refused(pool: Pool) -> None:
    pool.add_slot(MB)
    with pytest.raises(FileExistsError):
        Pool.create(pool.path)
    assert sorted(path.name for path in pool.path.parent.iterdir()) == ["pool"]
    with Pool.open(pool.path) as again:
        assert len(again.slots) == 1


def test_what_a_dead_keeper_left_of_a_pool_in_the_making_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "pool.new").write_bytes(b"half")
    with Pool.create(tmp_path / "pool") as pool:
        assert len(pool.slots) == 0


def test_a_symlink_in_the_place_of_a_pool_is_refused(pool: Pool, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(pool.path)
    with pytest.raises(OSError, match="symbolic links"):
        Pool.open(link)
    with pytest.raises(FileExistsError):
        Pool.create(link)


@pytest.mark.parametrize("size_bytes", [0, 100, TABLE_BYTES - 1, TABLE_BYTES, 2 * TABLE_BYTES])
def test_a_file_that_is_no_pool_is_refused(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "pool").write_bytes(b"\7" * size_bytes)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolDamaged, match=str(tmp_path / "pool")):
        Pool.open(tmp_path / "pool")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slot_outside_the_file_is_refused_and_not_touched(pool: Pool) -> None:
    pool.add_slot(MB)
    with Pool.open(pool.path) as other:
        os.truncate(pool.path, TABLE_BYTES + MB // 2)
        with pytest.raises(PoolDamaged, match="slot 0 is said to be at"):
            _ = other.slots[0].image


def test_slots_lie_behind_each_other_in_whole_pages(pool: Pool) -> None:
    slots = [pool.add_slot(size) for size in (1, PAGE_BYTES, PAGE_BYTES + 1, 0)]
    assert [slot.capacity_bytes // PAGE_BYTES for slot in slots] == [1, 1, 2, 1]
    ends = [slot.image_offset_bytes + slot.capacity_bytes for slot in slots]
    assert [slot.values_offset_bytes for slot in slots] == [TABLE_BYTES, *ends[:-1]]
    assert all(slot.image_offset_bytes % PAGE_BYTES == 0 for slot in slots)
    assert pool.path.stat().st_size == ends[-1]
    assert all(len(slot.image) == slot.capacity_bytes for slot in slots)


def test_all_memory_of_a_slot_is_there_before_it_is_used(pool: Pool) -> None:
    pool.add_slot(3 * MB)
    assert used_bytes(pool.path) >= TABLE_BYTES + VALUES_BYTES + 3 * MB


def test_image_and_values_are_seen_through_another_mapping(pool: Pool) -> None:
    pool.add_slot(MB)
    with Pool.open(pool.path) as other:
        write(pool, 0, 5, 7)
        slot = other.slots[0]
        assert slot.read().status is SlotStatus.CAPTURED
        assert (slot.values, slot.size_bytes) == (b'{"step":5}', 10_000)
        assert bytes(slot.image[:10_001]) == b"\7" * 10_000 + b"\0"
        os_bytes = pool.path.read_bytes()
        start = slot.image_offset_bytes
        assert os_bytes[start : start + 3] == b"\7\7\7"


def test_slots_that_another_process_adds_are_seen(pool: Pool) -> None:
    with Pool.open(pool.path) as other:
        assert len(other.slots) == 0
        pool.add_slot(MB)
        pool.add_slot(MB)
        assert [slot.index for slot in other.slots] == [0, 1]


def test_values_that_are_too_long_are_refused_and_the_slot_stays_filling(pool: Pool) -> None:
    slot = pool.add_slot(MB)
    slot.claim(this_process(), 0, State(1, 1), Due.NOWHERE)
    with pytest.raises(NotRepresentable, match="262,145 bytes of JSON, of at most 262,144"):
        slot.captured(b"x" * (VALUES_BYTES + 1), 10)
    with pytest.raises(ValueError, match=f"{MB + 1} bytes in {MB}"):
        slot.captured(b"", MB + 1)
    assert slot.status is SlotStatus.FILLING
    slot.captured(b"x" * VALUES_BYTES, MB)
    assert len(slot.values) == VALUES_BYTES


def test_values_are_not_written_into_a_slot_that_is_not_being_filled(pool: Pool) -> None:
    pool.add_slot(MB)
    write(pool, 0, 1, 1)
    with pytest.raises(WrongStatus):
        pool.slots[0].captured(b"others", 10)
    assert pool.slots[0].values == b'{"step":1}'


def test_a_removed_slot_gives_its_memory_back_and_its_place_is_used_again(pool: Pool) -> None:
    pool.add_slot(4 * MB)
    pool.add_slot(MB)
    write(pool, 0, 1, 1)
    before = used_bytes(pool.path)
    assert pool.remove_slot(0) == 4 * MB + VALUES_BYTES
    assert used_bytes(pool.path) == before - 4 * MB - VALUES_BYTES
    assert pool.slots[0].status is SlotStatus.ABSENT
    assert pool.add_slot(MB).index == 2  # too small for it
    assert pool.add_slot(5 * MB).index == 3  # too large
    again = pool.add_slot(2 * MB)
    assert (again.index, again.capacity_bytes, again.status) == (0, 4 * MB, SlotStatus.FREE)
    assert bytes(again.image[:3]) == b"\0\0\0"


def test_an_old_view_of_a_removed_slot_sees_zeros(pool: Pool) -> None:
    pool.add_slot(MB)
    write(pool, 0, 1, 1)
    view = pool.slots[0].image
    pool.remove_slot(0)
    assert bytes(view[:10]) == b"\0" * 10


def test_what_a_dead_keeper_left_in_a_row_that_it_had_yet_to_count_is_no_hindrance(
    pool: Pool,
) -> None:
    row = SlotRow(pool._words, 0)
    row.place(7, 7)
    row.present()
    slot = pool.add_slot(MB)
    assert (slot.index, slot.values_offset_bytes, slot.status) == (0, TABLE_BYTES, SlotStatus.FREE)


def test_threads_that_add_slots_get_slots_of_their_own(pool: Pool) -> None:
    with ThreadPoolExecutor(4) as threads:
        slots = list(threads.map(lambda _: pool.add_slot(MB), range(12)))
    assert sorted(slot.index for slot in slots) == list(range(12))
    assert len({slot.values_offset_bytes for slot in slots}) == 12
    assert pool.path.stat().st_size == TABLE_BYTES + 12 * (MB + VALUES_BYTES)


def test_a_table_that_is_full_is_said(pool: Pool) -> None:
    pool.header.rows = SLOTS_MAX
    with pytest.raises(PoolFull, match="1024"):
        pool.add_slot(1)


def test_prefaulting_changes_no_byte(pool: Pool) -> None:
    pool.add_slot(MB)
    write(pool, 0, 1, 9)
    with Pool.open(pool.path) as other:
        other.slots[0].prefault()
        assert bytes(other.slots[0].image[:10_000]) == b"\11" * 10_000


def test_a_tensor_into_a_slot_outlives_the_pool(pool: Pool) -> None:
    pool.add_slot(MB)
    other = Pool.open(pool.path)
    tensor = torch.frombuffer(other.slots[0].image, dtype=torch.uint8)
    slot = other.slots[0]
    other.close()
    other.close()
    del other
    gc.collect()
    tensor.fill_(3)
    assert bytes(pool.slots[0].image[:2]) == b"\3\3"
    assert slot.status is SlotStatus.FREE


def mappings_of(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_closed_pool_leaves_no_descriptor_and_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = Pool.create(path)
    for _ in range(3):
        pool.add_slot(MB)
    assert mappings_of(path) == 4
    pool.close()
    del pool
    gc.collect()
    assert mappings_of(path) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_more_than_the_machine_has_is_refused_with_both_numbers(pool: Pool) -> None:
    before = used_bytes(pool.path)
    with pytest.raises(PoolTooLarge, match="an image of rank 3 needs a slot of") as caught:
        pool.add_slot(1 << 45, what="an image of rank 3")
    error = caught.value
    assert f"{error.needed_bytes:,}" in str(error)
    assert f"{error.available_bytes:,}" in str(error)
    assert error.needed_bytes > error.available_bytes > 0
    assert isinstance(error, MemoryError)
    assert (used_bytes(pool.path), len(pool.slots)) == (before, 0)


def test_a_tmpfs_that_is_too_small_is_refused_with_numbers_before_it_is_touched(
    small: Path,
) -> None:
    with Pool.create(small / "pool") as pool:
        pool.add_slot(2 * MB)
        before = used_bytes(pool.path)
        with pytest.raises(PoolTooLarge, match="its file system has only 4,") as caught:
            pool.add_slot(6 * MB)
        assert caught.value.needed_bytes == 6 * MB + VALUES_BYTES
        assert caught.value.available_bytes == SMALL_BYTES - before
        assert (used_bytes(pool.path), len(pool.slots)) == (before, 1)
        write(pool, 0, 1, 1)
        slot = pool.add_slot(4 * MB)  # what is left serves a smaller one
        slot.image[:] = b"\1" * (4 * MB)


def test_a_tmpfs_with_no_room_for_the_table_is_refused(small: Path) -> None:
    (small / "other").write_bytes(b"\1" * (SMALL_BYTES - MB // 2))
    with pytest.raises(PoolTooLarge, match=f"the table of {small / 'pool'}"):
        Pool.create(small / "pool")
    assert [path.name for path in small.iterdir()] == ["other"]


def test_room_that_another_takes_meanwhile_is_a_refusal_that_leaves_nothing(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system says that it has room, and then it has not."""
    monkeypatch.setattr(pool_module, "_STRIDE_BYTES", MB)
    with Pool.create(small / "pool") as pool:
        before = used_bytes(pool.path)
        honest = os.fstatvfs(pool._fd.number)
        with monkeypatch.context() as patch:
            boasted = [*honest]
            boasted[4] *= 1000
            patch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(boasted))
            with pytest.raises(PoolTooLarge, match="bytes free"):
                pool.add_slot(20 * MB)
        assert used_bytes(pool.path) == before
        assert pool.add_slot(6 * MB).index == 0


def test_what_the_file_system_says_is_believed_before_it_is_asked_for_more(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no space can be reserved, the C library writes it page by page until it fails."""
    tight = [*os.fstatvfs(pool._fd.number)]
    tight[4] = MB // tight[1]
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(tight))
    before = used_bytes(pool.path)
    with pytest.raises(PoolTooLarge, match="its file system has only 1,048,576 bytes free"):
        pool.add_slot(MB)
    assert used_bytes(pool.path) == before


def test_memory_that_must_stay_free_is_not_taken(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda: HEADROOM_BYTES + 2 * MB)
    assert pool.add_slot(MB).index == 0
    with pytest.raises(PoolTooLarge, match="only 2,097,152 bytes of memory are available"):
        pool.add_slot(2 * MB)


def test_a_file_size_limit_is_a_refusal(pool: Pool) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MB, limits[1]))
    try:
        with pytest.raises(PoolTooLarge):
            pool.add_slot(8 * MB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_kernel_that_cannot_populate_still_touches_every_page(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_MADV_POPULATE_WRITE", 9999)
    slot = pool.add_slot(MB)
    assert not any(slot.image)


def test_a_file_system_without_holes_keeps_the_memory_for_the_next_slot(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.add_slot(MB)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "MADV_REMOVE", 9999)
        assert pool.remove_slot(0) == 0
    assert pool.add_slot(MB).index == 0


# Several processes.

PROGRAM = """
import sys
from pathlib import Path
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.process import this_process
from keepstep.ckpt.tiers import Due

pool = Pool.open(Path(sys.argv[1]))
seat, me = pool.seats[0], this_process()
for line in sys.stdin:
    step = int(line)
    slot = pool.slots[step % 2]
    slot.claim(me, 4, State(2, step), Due.DISK)
    slot.image[:4] = step.to_bytes(4, "little")
    slot.captured(str(step).encode(), 4)
    seat.agreed_acked = step
    print(seat.acked, flush=True)
"""


@pytest.mark.ranks
def test_two_processes_see_each_others_words(pool: Pool) -> None:
    pool.add_slot(MB)
    pool.add_slot(MB)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(pool.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            for step in range(20):
                pool.seats[0].acked = step - 1
                child.stdin.write(f"{step}\n")
                child.stdin.flush()
                assert int(child.stdout.readline()) == step - 1
                slot = pool.slots[step % 2]
                assert slot.read().writer.pid == child.pid
                assert (slot.state, slot.due) == (State(2, step), Due.DISK)
                assert (slot.values, bytes(slot.image[:4])) == (
                    str(step).encode(),
                    step.to_bytes(4, "little"),
                )
                assert pool.seats[0].agreed_acked == step
                slot.sealed()
            child.stdin.close()
            assert child.wait(30) == 0
        finally:
            child.kill()


def write_for_ever(path: Path) -> None:
    """Images of which every byte is the step's."""
    with Pool.open(path) as pool:
        me = this_process()
        for step in range(10**9):
            slot = pool.slots[step % 3]
            while slot.status not in (SlotStatus.FREE, SlotStatus.SEALED):
                time.sleep(0.0001)
            fill = step % 251
            slot.claim(me, 0, State(1, step), Due.NOWHERE)
            slot.image[:] = bytes([fill]) * slot.capacity_bytes
            slot.captured(b"%d" % step, slot.capacity_bytes)


def seal_for_ever(path: Path) -> None:
    with Pool.open(path) as pool:
        while True:
            for slot in pool.slots:
                if slot.status is SlotStatus.CAPTURED:
                    slot.sealed()


@pytest.mark.ranks
def test_processes_killed_anywhere_leave_only_whole_images(pool: Pool) -> None:
    """A writer and a sealer are killed at random moments. What is CAPTURED or SEALED is whole; at
    most one slot is FILLING, its owner's; and both can go on from what is there."""
    rng = random.Random(7)
    for _ in range(3):
        pool.add_slot(16 * PAGE_BYTES)
    for _ in range(25):
        children = []
        for work in (write_for_ever, seal_for_ever):
            pid = os.fork()
            if not pid:
                try:
                    work(pool.path)
                finally:
                    os._exit(1)
            children.append(pid)
        try:
            time.sleep(rng.uniform(0.005, 0.05))
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        filling = []
        for slot in pool.slots:
            facts = slot.read()
            if facts.status is SlotStatus.FILLING:
                filling.append(slot)
            elif facts.status in (SlotStatus.CAPTURED, SlotStatus.SEALED):
                assert set(bytes(slot.image)) == {facts.state.step % 251}
                assert slot.values == b"%d" % facts.state.step
        assert len(filling) <= 1
        for slot in filling:
            slot.free()


def make_for_ever(path: Path) -> None:
    with Pool.open(path) as pool:
        while True:
            for size in (MB, 3 * MB, 7 * MB):
                slot = pool.add_slot(size)
                slot.image[-1] = 1
            for index in range(len(pool.slots)):
                if pool.slots[index].status is SlotStatus.FREE:
                    pool.remove_slot(index)


@pytest.mark.ranks
def test_a_keeper_killed_while_it_makes_slots_leaves_a_pool_that_can_be_used(pool: Pool) -> None:
    rng = random.Random(3)
    for _ in range(25):
        pid = os.fork()
        if not pid:
            try:
                make_for_ever(pool.path)
            finally:
                os._exit(1)
        try:
            time.sleep(rng.uniform(0.002, 0.03))
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        with Pool.open(pool.path) as successor:
            for slot in successor.slots:
                if slot.status is SlotStatus.FREE:
                    slot.image[-1] = 2
            slot = successor.add_slot(2 * MB)
            slot.image[:] = b"\3" * slot.capacity_bytes
            successor.remove_slot(slot.index)
    places = sorted((slot.values_offset_bytes, slot.capacity_bytes) for slot in pool.slots)
    for (start, capacity), (following, _) in pairwise(places):
        assert start + VALUES_BYTES + capacity <= following


@pytest.mark.ranks
def test_a_writer_that_died_in_a_full_tmpfs_loses_no_sealed_image(small: Path) -> None:
    with Pool.create(small / "pool") as pool:
        pool.add_slot(2 * MB)
        pool.add_slot(2 * MB)
        write(pool, 0, 1, 5)
        pool.slots[0].sealed()
        filler = small / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(b"\1" * SMALL_BYTES)
        pid = os.fork()
        if not pid:
            slot = Pool.open(pool.path).slots[1]
            slot.claim(this_process(), 0, State(1, 2), Due.NOWHERE)
            slot.image[:] = b"\2" * len(slot.image)  # would be SIGBUS if it were not there
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert pool.slots[1].status is SlotStatus.FILLING
        assert bytes(pool.slots[0].image[:3]) == b"\5\5\5"
        assert pool.slots[0].read().status is SlotStatus.SEALED

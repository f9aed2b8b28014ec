"""Disks that hang without an error: what goes past them, and what they show when they come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.kit.drain_bench import CLOSE_S, Bench, at, is_there, opened, steps_on
from tests.kit.faulty_store import FaultyStore
from tests.kit.shelved import READ_BYTES_MAX, shelve, tenure_of
from tests.kit.slow_store import Gate

from keepstep.ckpt.keys import image_key
from keepstep.ckpt.tiers import Due
from keepstep.ckpt.verify import verify
from keepstep.storage.store import Buffer


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as made:
        yield made


def test_a_disk_that_hangs_holds_up_neither_commits_nor_slots(bench: Bench) -> None:
    gate = Gate(bench.disk, "put_stream", "s000000000010")
    drains = bench.drains(disk=gate, patience_s=2.0)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10)), drains.sealed)
    assert gate.entered.wait(60)
    bench.ear.wait_event("disk_slow")
    bench.ear.wait_committed(at(10))
    assert not gate.opened.is_set()
    for step in (20, 30):
        bench.host.seal(shelve(at(step)), drains.sealed)
        bench.ear.wait_committed(at(step))
        bench.ear.wait_drained(0, step)
        bench.ear.wait_drained(1, step)
    _, reason, details = next(each for each in bench.ear.events if each[0] == "disk_slow")
    assert "without an error" in reason
    assert (details["step"], details["tier"]) == (10, "disk")
    assert details["under_way_s"] >= 0.5
    began_s = time.monotonic()
    drains.close(60.0)
    assert time.monotonic() - began_s < 30, "who ends waits for a disk that hangs"
    gate.opened.set()


def test_what_is_due_on_a_hanging_disk_alone_keeps_its_slot_for_a_while_only(bench: Bench) -> None:
    gate = Gate(bench.disk, "put_stream")
    drains = bench.drains(disk=gate, patience_s=1.0)
    drains.enter(tenure_of())
    bench.host.seal(shelve(at(10), Due.DISK), drains.sealed)
    bench.ear.wait_event("disk_slow")
    assert bench.ear.drained_steps == {}
    bench.host.seal(shelve(at(20), Due.DISK), drains.sealed)
    for rank in (0, 1):
        bench.ear.wait_drained(rank, 20)
    gate.opened.set()
    deadline_s = time.monotonic() + 60
    while not is_there(bench.disk, image_key(at(20), 1)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert steps_on(bench.disk) == {10, 20}, "nobody had written over them"
    drains.close(CLOSE_S)


def test_a_late_disk_shows_nothing_of_memory_that_was_written_over(bench: Bench) -> None:
    """The stream had passed the check, and hung on its way; then the store had the image."""

    class HangsAfterTheCheck(FaultyStore):
        hung = threading.Event()
        opened = threading.Event()

        def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
            def slow() -> Iterator[Buffer]:
                for chunk in chunks:
                    if key == image_key(at(10), 0):  # of one piece: that was held back till then
                        self.hung.set()
                        assert self.opened.wait(60)
                    yield chunk

            super().put_stream(key, slow(), size_bytes)

    disk = HangsAfterTheCheck(bench.disk)
    drains = bench.drains(disk=disk, patience_s=1.0)
    drains.enter(tenure_of())
    images = shelve(at(10))
    bench.host.seal(images, drains.sealed)
    assert disk.hung.wait(20)
    bench.ear.wait_committed(at(10))
    bench.ear.wait_drained(0, 10)
    images[0].view[-1] ^= 1
    disk.opened.set()
    bench.ear.wait_event("drain_lost")
    drains.close(CLOSE_S)
    assert not is_there(bench.disk, image_key(at(10), 0))
    assert "corrupt" not in bench.ear.kinds(), "nothing is wrong with memory"
    assert verify(bench.store, threads=1).findings == ()


def test_when_a_late_disk_has_it_first_the_store_takes_it_from_there(bench: Bench) -> None:
    """The slot went with the disk's copy, and was written over while the upload was under way."""
    on = Gate(bench.disk, "put_stream", "r00000")
    up = Gate(bench.store, "put_stream", "r00000")
    drains = bench.drains(store=up, disk=on, patience_s=1.0)
    drains.enter(tenure_of())
    images = shelve(at(10))
    before = bytes(images[0].view)
    bench.host.seal(images, drains.sealed)
    assert up.entered.wait(60)
    on.opened.set()
    bench.ear.wait_drained(0, 10)
    images[0].view[-1] ^= 1
    up.opened.set()
    bench.ear.wait_committed(at(10))
    assert bench.store.get(image_key(at(10), 0), READ_BYTES_MAX) == before
    assert "corrupt" not in bench.ear.kinds()
    drains.close(CLOSE_S)
    assert verify(bench.store, threads=1).findings == ()

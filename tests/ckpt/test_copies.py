"""An image with several copies: what one has wrong comes from the next, and is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.checkpoints import write_images
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.peers import serving

from keepstep.ckpt.candidates import Place
from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_count
from keepstep.ckpt.copies import Copies, Course, Lost
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import ImageRecord, State, TensorSpec
from keepstep.ckpt.sources import Origin, origin_of
from keepstep.ckpt.tiers import Tier
from keepstep.storage.errors import Denied, NotFound, Transient, Truncated
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

STATE = State(1, 7)
TENSORS = {
    "model/a": TensorSpec(shape=(1_300_000,), dtype="F32", placement=0),
    "model/b": TensorSpec(shape=(300_000,), dtype="F64", placement=0),
}
KEY = image_key(STATE, 0)
PEER, FAR, STORE = Place(Tier.PEER, "b"), Place(Tier.MEMORY, "c"), Place(Tier.STORE, "")


@dataclass
class Image:
    """The image of rank 0, as bytes and record."""

    data: bytes
    record: ImageRecord

    @property
    def payload(self) -> bytes:
        return self.data[self.record.header_bytes :]

    @property
    def chunks(self) -> int:
        return chunk_count(len(self.payload))

    def store(self, *changes: int) -> MemoryStore:
        """A copy in which these bytes of the data are wrong."""
        damaged = bytearray(self.data)
        for place in changes:
            damaged[self.record.header_bytes + place] ^= 1
        store = MemoryStore()
        store.put(KEY, bytes(damaged))
        return store

    def copies(self, *stores: tuple[Place, Store], course: Course | None = None) -> Copies:
        origins = [Origin(place, store, is_in_place=False) for place, store in stores]
        return Copies(STATE, self.record, origins, course or Course(sleep=lambda _: None))


@pytest.fixture(scope="module")
def image() -> Image:
    store = MemoryStore()
    manifest = write_images(store, STATE, TENSORS)
    return Image(store.get(KEY, 1 << 30), manifest.images[0])


@pytest.fixture
def course() -> Iterator[Course]:
    slept: list[float] = []
    yield Course(sleep=slept.append)
    assert sum(slept) < 10


def brought(copies: Copies, image: Image, first: int = 0, last: int | None = None) -> bytes:
    last = image.chunks if last is None else last
    target = bytearray(min(last * CHUNK_BYTES, len(image.payload)) - first * CHUNK_BYTES)
    copies.read_into(first, last, memoryview(target))
    return bytes(target)


def test_the_nearest_copy_is_read_and_no_other(image: Image, course: Course) -> None:
    far = FaultyStore(image.store())
    copies = image.copies((PEER, image.store()), (STORE, far), course=course)
    assert brought(copies, image) == image.payload
    assert far.calls == []
    assert course.faults == []
    assert course.read_bytes == {"peer": len(image.data)}


def test_wrong_chunks_alone_come_from_the_next_copy_and_are_told(
    image: Image, course: Course
) -> None:
    wrong = [0, 2 * CHUNK_BYTES + 5, len(image.payload) - 1]
    near = image.store(*wrong)
    copies = image.copies((PEER, near), (STORE, image.store()), course=course)
    assert brought(copies, image) == image.payload
    assert [fault.place for fault in course.faults] == [PEER] * 3
    for fault, place in zip(course.faults, wrong, strict=True):
        assert isinstance(fault.error, Corrupt)
        start = place // CHUNK_BYTES * CHUNK_BYTES
        assert fault.error.offset == image.record.header_bytes + start
        assert fault.error.tensor in TENSORS
    last = len(image.payload) - (image.chunks - 1) * CHUNK_BYTES
    assert course.read_bytes["store"] == 2 * CHUNK_BYTES + last


def test_each_of_two_copies_makes_good_what_the_other_has_wrong(
    image: Image, course: Course
) -> None:
    near, next_one = image.store(1), image.store(CHUNK_BYTES + 1)
    copies = image.copies((PEER, near), (FAR, next_one), course=course)
    assert brought(copies, image) == image.payload
    assert {(fault.place, fault.error.offset) for fault in course.faults} == {  # type: ignore[union-attr]
        (PEER, image.record.header_bytes)
    }


def test_a_byte_that_is_wrong_everywhere_is_lost_and_nothing_but_damage(image: Image) -> None:
    copies = image.copies((PEER, image.store(3)), (STORE, image.store(4)))
    with pytest.raises(Lost, match=r"data chunk 0 of .*peer of b: .*the store: ") as lost:
        brought(copies, image)
    assert not lost.value.is_trouble


@pytest.mark.parametrize("error", [Transient, NotFound, Truncated, Denied])
def test_a_copy_that_cannot_be_read_is_passed_by(
    image: Image, course: Course, error: type[Transient]
) -> None:
    reads = frozenset({"read_into"})
    near = FaultyStore(image.store(), Fault(Action.FAIL, operations=reads, times=99, error=error))
    copies = image.copies((PEER, near), (STORE, image.store()), course=course)
    assert brought(copies, image) == image.payload
    assert {type(fault.error) for fault in course.faults} == {error}
    assert {fault.place for fault in course.faults} == {PEER}


def test_a_short_read_that_says_all_is_well_is_found_by_the_checksum(
    image: Image, course: Course
) -> None:
    near = FaultyStore(image.store(), Fault(Action.SHORT, operations=frozenset({"read_into"})))
    copies = image.copies((PEER, near), (STORE, image.store()), course=course)
    assert brought(copies, image) == image.payload
    assert course.faults


def test_a_hiccup_of_the_store_is_waited_out(image: Image, course: Course) -> None:
    reads = frozenset({"read_into", "get_range", "stat"})
    store = FaultyStore(image.store(), Fault(Action.FAIL, operations=reads, times=3))
    copies = image.copies((STORE, store), course=course)
    assert brought(copies, image) == image.payload
    assert course.faults == []


def test_a_store_that_stays_silent_is_trouble_and_no_damage(image: Image) -> None:
    store = FaultyStore(image.store(), Fault(Action.FAIL, times=10_000))
    copies = image.copies((PEER, image.store(3)), (STORE, store))
    with pytest.raises(Lost) as lost:
        brought(copies, image)
    assert lost.value.is_trouble


def test_a_silent_peer_is_no_trouble_its_copy_is_just_gone(image: Image) -> None:
    peer = FaultyStore(image.store(), Fault(Action.FAIL, times=10_000))
    with pytest.raises(Lost) as lost:
        brought(image.copies((PEER, peer)), image)
    assert not lost.value.is_trouble


def test_who_was_silent_once_is_asked_last_from_then_on(image: Image, course: Course) -> None:
    reads = frozenset({"read_into"})
    peer = FaultyStore(image.store(), Fault(Action.FAIL, operations=reads, times=2))
    copies = image.copies((PEER, peer), (FAR, image.store()), course=course)
    brought(copies, image, 0, 1)
    asked = len(peer.calls)
    assert brought(copies, image, 1, 3) == image.payload[CHUNK_BYTES : 3 * CHUNK_BYTES]
    assert len(peer.calls) == asked


def test_a_damaged_header_is_read_from_the_next_copy(image: Image, course: Course) -> None:
    damaged = image.store(-100)  # within the header's padding or text
    copies = image.copies((PEER, damaged), (STORE, image.store()), course=course)
    assert copies.header() == image.data[: image.record.header_bytes]
    (fault,) = course.faults
    assert isinstance(fault.error, Corrupt)
    assert brought(copies, image) == image.payload


def test_a_copy_of_another_size_is_told_as_that(image: Image, course: Course) -> None:
    short = MemoryStore()
    short.put(KEY, image.data[:-10])
    copies = image.copies((PEER, short), (STORE, image.store()), course=course)
    assert brought(copies, image) == image.payload
    assert any(isinstance(f.error, FormatError | Truncated) for f in course.faults)


def test_a_peer_over_the_network_that_dies_between_two_reads(image: Image, course: Course) -> None:
    with serving(image.store(), timeout_s=2.0) as peer:
        copies = image.copies((PEER, peer), (STORE, image.store()), course=course)
        assert brought(copies, image, 0, 1) == image.payload[:CHUNK_BYTES]
    assert brought(copies, image, 1, 2) == image.payload[CHUNK_BYTES : 2 * CHUNK_BYTES]
    assert {type(fault.error) for fault in course.faults} == {Transient}


def test_a_file_is_verified_where_it_lies(image: Image, tmp_path: Path, course: Course) -> None:
    store = FileStore(tmp_path)
    store.put(KEY, image.data)
    copies = Copies(STATE, image.record, [origin_of(STORE, store)], course)
    assert copies.is_in_place
    view = copies.view()
    assert view is not None
    assert copies.check_in_place(view, 0, image.chunks) == []
    assert bytes(view) == image.data
    assert course.read_bytes["store"] >= len(image.payload)


def test_wrong_bytes_in_place_are_named_and_never_asked_for_again(
    image: Image, tmp_path: Path, course: Course
) -> None:
    damaged = bytearray(image.data)
    damaged[image.record.header_bytes + CHUNK_BYTES] ^= 1
    store = FileStore(tmp_path)
    store.put(KEY, bytes(damaged))
    far = Origin(STORE, image.store(), is_in_place=False)
    here = origin_of(Place(Tier.DISK, "a"), store)
    copies = Copies(STATE, image.record, [here, far], course)
    view = copies.view()
    assert view is not None
    assert copies.check_in_place(view, 0, image.chunks) == [1]
    copies.spoil([1])
    assert brought(copies, image) == image.payload
    assert len(course.faults) == 1
    assert course.read_bytes["store"] == CHUNK_BYTES


def test_a_file_that_is_cut_short_is_no_signal_but_a_fault(
    image: Image, tmp_path: Path, course: Course
) -> None:
    store = FileStore(tmp_path)
    store.put(KEY, image.data)
    copies = Copies(STATE, image.record, [origin_of(STORE, store)], course)
    copies.header()
    view = copies.view()
    assert view is not None
    with (tmp_path / KEY).open("r+b") as file:
        file.truncate(image.record.header_bytes + CHUNK_BYTES)
    assert copies.check_in_place(view, 0, 1) == []
    assert copies.check_in_place(view, 1, image.chunks) == list(range(1, image.chunks))
    (fault,) = course.faults
    assert "cannot be read" in str(fault.error)


def test_no_copy_that_can_be_reached_is_said_as_that(image: Image) -> None:
    with pytest.raises(Lost, match="no copy of it can be reached"):
        brought(image.copies(), image)

"""Drains that compress: what they put, what is committed, and what a keeper that dies leaves."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.kit.checkpoints import TENSORS
from tests.kit.crash_drain import drain_save
from tests.kit.crash_save import NEW, OLD, POLICY, expected_files, faults_going_on, prepare
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.shelved import JOB, Ear, Host, begin_generation, shelve, tenure_of

from keepstep.ckpt.candidates import candidates, settle
from keepstep.ckpt.checked_stream import CopyStream, MemoryStream
from keepstep.ckpt.drains import Drains
from keepstep.ckpt.encoding import SPAN_BYTES
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.image_encoder import ImageEncoder
from keepstep.ckpt.inventory import Copy, Inventory
from keepstep.ckpt.keys import done_key, encoded_key, image_key, state_prefix
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import DoneRecord, State, TensorSpec, done_record
from keepstep.ckpt.plain_view import plain_view
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.store_tier import StoreTier, read_done
from keepstep.ckpt.tiers import Due, Tier, TierPolicy
from keepstep.ckpt.verify import verify
from keepstep.storage.errors import StoreError, Transient
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

AT = State(1, 10)
CLOSE_S = 20.0


@pytest.fixture
def verifiers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def committed(store: Store, at: State) -> dict[int, bytes]:
    """The plain images of a committed state, by rank."""
    (commit,) = [one for one in Log(store).read().live if one.state == at]
    manifest = open_checkpoint(store, commit).manifest
    view = plain_view(store, manifest)
    return {image.rank: view.get(image_key(at, image.rank), 1 << 30) for image in manifest.images}


def plain_images(at: State) -> dict[int, bytes]:
    return {shelved.rank: bytes(shelved.view) for shelved in shelve(at)}


@pytest.mark.parametrize("has_disk", [True, False])
def test_images_go_encoded_to_the_store_and_plain_to_the_disk(
    tmp_path: Path, has_disk: bool
) -> None:
    store, disk = MemoryStore(), MemoryStore()
    begin_generation(store)
    ear, host = Ear(), Host()
    drains = Drains(
        lambda: store,
        (lambda: disk) if has_disk else None,
        host.shelf,
        ear,
        job=JOB,
        patience_s=1.0,
        compresses=True,
    )
    drains.enter(tenure_of())
    host.seal(shelve(AT), drains.sealed)
    ear.wait_committed(AT)
    drains.close(CLOSE_S)
    keys = {info.key.removeprefix(state_prefix(AT)) for info in store.list("states/")}
    assert {key for key in keys if key.startswith("r0000") and not key.endswith(".json")} == {
        "r00000.safetensors.zst",
        "r00001.safetensors.zst",
    }
    assert committed(store, AT) == plain_images(AT)
    assert verify(store).findings == ()
    if has_disk:
        assert disk.get(image_key(AT, 0), 1 << 24) == plain_images(AT)[0]
    assert [kind for kind in ear.kinds() if kind != "checkpoint_committed"] == []


def successor(store: Store, compresses: bool) -> None:
    """Started anew in the same generation, and perhaps told otherwise."""
    lineage = Log(store).read()
    newest = lineage.generation
    if newest is None or newest.number != NEW.generation:
        return
    ear, host = Ear(), Host()
    drains = Drains(
        lambda: store, None, host.shelf, ear, job=JOB, patience_s=0.2, compresses=compresses
    )
    policy = TierPolicy(keep=POLICY.keep_last)
    drains.enter(tenure_of(NEW.generation, term=lineage.term, base=OLD, store=policy))
    host.seal(shelve(NEW, Due.STORE), drains.sealed)
    ear.wait_committed(NEW)
    drains.close(CLOSE_S)


def calls_of_a_save() -> list[tuple[str, str]]:
    store = MemoryStore()
    prepare(store)
    watched = FaultyStore(store)
    drain_save(watched, compresses=True)
    return watched.calls


CALLS = calls_of_a_save()


@pytest.mark.parametrize("compresses", [True, False])
@pytest.mark.parametrize("action", [Action.CRASH_BEFORE, Action.CRASH_AFTER])
def test_killed_at_any_call_its_successor_commits_the_same_state(
    action: Action, compresses: bool
) -> None:
    assert [key.endswith(".zst") for call, key in CALLS if call == "put_stream"] == [True, True]
    for at, call in enumerate(CALLS):
        store = MemoryStore()
        prepare(store)
        faulty = FaultyStore(store, Fault(action, at))
        with contextlib.suppress(Crashed, StoreError):
            drain_save(faulty, is_dead=lambda: faulty.is_dead, compresses=True)  # noqa: B023
        successor(store, compresses)
        assert verify(store).findings == (), call
        newest = Log(store).read()
        assert newest.ignored == (), call
        if newest.live[0].state == NEW:
            assert committed(store, NEW) == plain_images(NEW), call
        else:
            assert newest.generation is not None
            assert newest.generation.number < NEW.generation, call
        for key, data in expected_files().items():
            if key.startswith(state_prefix(OLD)):
                assert store.get(key, 1 << 24) == data, call
        assert faults_going_on(store) == [], call


@pytest.mark.parametrize("action", [Action.FAIL, Action.LOSE_ANSWER])
def test_refused_or_unclear_at_any_write_it_is_committed_all_the_same(action: Action) -> None:
    writes = [call for call in CALLS if call[0] in WRITES]
    for at in range(2, len(writes)):
        store = MemoryStore()
        prepare(store)
        faulty = FaultyStore(store, Fault(action, at, operations=WRITES, error=Transient))
        drain_save(faulty, compresses=True)
        assert committed(store, NEW) == plain_images(NEW), writes[at]
        assert verify(store).findings == (), writes[at]


# One image.


@cache
def _big() -> Shelved:
    tensors = TENSORS | {"model/w": TensorSpec((9 * SPAN_BYTES // 16,), "F32", 0)}
    (shelved,) = shelve(AT, ranks=(0,), tensors=tensors)
    return shelved


def big() -> Shelved:
    """An image of more than one span, to be changed at will."""
    return replace(_big(), view=memoryview(bytearray(_big().view)))


def test_disk_and_memory_give_one_encoding(verifiers: ThreadPoolExecutor) -> None:
    shelved, disk = big(), MemoryStore()
    key = image_key(AT, 0)
    disk.put(key, bytes(shelved.view))
    from_memory = MemoryStream(shelved.view, shelved.header, shelved.record, key, verifiers)
    from_disk = CopyStream(disk, key, shelved.header, shelved.record)
    stored = []
    for stream in (from_memory, from_disk):
        store = MemoryStore()
        done = StoreTier(store, True).put(AT, shelved.record, shelved.header, stream)
        assert done.encoded is not None
        assert len(done.encoded.spans) >= 2
        assert read_done(store, AT, 0) == done
        assert StoreTier(store).settled(AT, shelved.record) == done
        stored.append(store.get(encoded_key(AT, 0), 1 << 30))
    assert stored[0] == stored[1]


def test_a_wrong_byte_in_memory_leaves_nothing_in_the_store(verifiers: ThreadPoolExecutor) -> None:
    shelved, store = big(), MemoryStore()
    shelved.view[-1] ^= 1
    stream = MemoryStream(shelved.view, shelved.header, shelved.record, "image", verifiers)
    with pytest.raises(Corrupt):
        StoreTier(store, True).put(AT, shelved.record, shelved.header, stream)
    assert list(store.list("")) == []


class Changing:
    """A stream whose bytes are others the second time, as memory that is written over."""

    def __init__(self, first: bytes, then: bytes) -> None:
        self._all = [first, then]

    def __iter__(self) -> Iterator[bytes]:
        yield self._all.pop(0)


def test_bytes_that_change_between_measuring_and_sending_are_refused() -> None:
    shelved, store = big(), MemoryStore()
    changed = bytearray(shelved.view)
    changed[-1] ^= 1
    stream = Changing(bytes(shelved.view), bytes(changed))
    with pytest.raises(Corrupt, match=r"r00000\.safetensors\.zst: span \d: .* a moment ago"):
        StoreTier(store, True).put(AT, shelved.record, shelved.header, stream)
    assert list(store.list("")) == []


@pytest.mark.parametrize("piece_bytes", [1_000, 4_096, 4_097, SPAN_BYTES - 1, SPAN_BYTES, 1 << 26])
def test_pieces_of_any_size_give_the_same_spans(piece_bytes: int) -> None:
    shelved = big()
    data = bytes(shelved.view)
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    encoder = ImageEncoder(pieces, shelved.header, "image")
    whole = ImageEncoder([data], shelved.header, "image")
    assert encoder.measure() == whole.measure() is not None
    assert b"".join(encoder) == b"".join(whole)


def test_an_image_of_too_many_spans_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    shelved = big()
    monkeypatch.setattr("keepstep.ckpt.image_encoder.SPANS_MAX", 1)
    assert ImageEncoder([bytes(shelved.view)], shelved.header, "image").measure() is None


# Done records.


def test_frames_of_a_done_record_are_checked(verifiers: ThreadPoolExecutor) -> None:
    shelved, store = shelve(AT)[0], MemoryStore()
    stream = MemoryStream(shelved.view, shelved.header, shelved.record, "image", verifiers)
    done = StoreTier(store, True).put(AT, shelved.record, shelved.header, stream)
    assert done == read_done(store, AT, 0)
    good = store.get(done_key(AT, 0), 1 << 20)
    for old, new in (
        (b'"encoded":{', b'"encoded":{"x":1,'),
        (b'"encoded":{', b'"encoded":null,"x":{'),
        (b'"spans":[[', b'"spans":[[3'),
        (b'"rank":0,"spans"', b'"rank":1,"spans"'),
    ):
        assert good.count(old) == 1
        store.put(done_key(AT, 0), good.replace(old, new))
        with pytest.raises(FormatError, match=r"r00000\.json"):
            read_done(store, AT, 0)


def test_a_plain_done_record_is_what_it_was() -> None:
    record = shelve(AT)[0].record
    assert done_record(record).image == record
    assert isinstance(done_record(record), DoneRecord)


def test_an_encoded_image_that_nobody_committed_makes_a_state_whole(
    verifiers: ThreadPoolExecutor,
) -> None:
    store = MemoryStore()
    begin_generation(store)
    images = shelve(AT)
    own, other = images
    stream = MemoryStream(other.view, other.header, other.record, "image", verifiers)
    StoreTier(store, True).put(AT, other.record, other.header, stream)
    copy = Copy(AT, own.record, Tier.MEMORY, own.structure.digest)
    inventory = Inventory("h0", "", "", 1, 1, (copy,))
    (found,) = candidates(Log(store).read(), [inventory], {AT: [read_done(store, AT, 1)]})
    manifest = settle(found, own.description()).manifest
    view = plain_view(store, manifest)
    assert view.get(image_key(AT, 1), 1 << 24) == bytes(other.view)


def test_a_keeper_that_does_not_compress_loads_no_numpy() -> None:
    code = (
        "import sys, keepstep.ckpt.drains, keepstep.ckpt.keeper_services\n"
        "print([name for name in ('torch', 'numpy', 'zstandard') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_a_file_store_takes_an_encoded_image(tmp_path: Path, verifiers: ThreadPoolExecutor) -> None:
    shelved, store = big(), FileStore(tmp_path)
    stream = MemoryStream(shelved.view, shelved.header, shelved.record, "image", verifiers)
    done = StoreTier(store, True).put(AT, shelved.record, shelved.header, stream)
    assert done.encoded is not None
    assert store.stat(encoded_key(AT, 0)).size_bytes == done.encoded.size_bytes

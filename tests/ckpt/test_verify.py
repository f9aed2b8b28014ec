"""Verifying: every flipped byte is found and named, and so is whatever else lies about."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.kit.checkpoints import TENSORS, begin, save, write_images
from tests.kit.logs import generation, open_log, retire, rewind, state

from keepstep.ckpt.checksum import CHUNK_BYTES, digest128
from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Commit
from keepstep.ckpt.image import build, image_record, seal
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keys import entry_key, image_key, manifest_key
from keepstep.ckpt.lineage import Lineage
from keepstep.ckpt.manifest import TensorSpec, decode_manifest
from keepstep.ckpt.verify import Progress, verify
from keepstep.ckpt.verify_image import Finding
from keepstep.storage.memory import MemoryStore

S10 = state(1, 10)
BIG = {
    "model/a": TensorSpec(shape=(3 * CHUNK_BYTES // 4,), dtype="F32", placement=1),
    "model/b": TensorSpec(shape=(2, 16), dtype="BF16", placement=1),
}


def small() -> MemoryStore:
    store = MemoryStore()
    begin(store, 10)
    return store


def damage(store: MemoryStore, key: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray(store.get(key, 1 << 30))
    change(data)
    store.put(key, bytes(data))


def flip(store: MemoryStore, key: str, place: int, bit: int = 0) -> None:
    def change(data: bytearray) -> None:
        data[place] ^= 1 << bit

    damage(store, key, change)


def test_a_good_store_has_no_findings() -> None:
    report = verify(small())
    assert report.job == "run-a"
    assert report.entries == 3
    assert [each.state for each in report.states] == [S10]
    assert report.findings == ()
    assert report.unreferenced == ()
    assert report.read_bytes == report.states[0].size_bytes


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_of_every_file_is_found_and_named(stride: int) -> None:
    """Goal: proof 4, exhaustively over a small store. Method: one bit of each byte, in turn."""
    store = small()
    for info in list(store.list("")):
        data = store.get(info.key, 1 << 20)
        image = parse(data[: _header_bytes(data)], info.key) if "/r" in info.key else None
        for place in range(0, len(data), stride):
            flip(store, info.key, place, place % 8)
            findings = verify(store).findings
            assert {finding.file for finding in findings} == {info.key}, place
            if image is not None and place >= image.header_bytes:
                names = image.names_at(place - image.header_bytes, 1)
                assert len(names) == 1
                assert names[0] in findings[0].tensors
                assert findings[0].part.startswith("chunk 0, bytes")
            elif image is not None:
                assert findings[0].part.startswith("header"), place
            store.put(info.key, data)
    assert verify(store).findings == ()


def _header_bytes(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def header_finding(store: MemoryStore, text: bytes, shift: int = 0) -> Finding:
    key = image_key(S10, 0)
    data = store.get(key, 1 << 20)
    place = data.index(text) + shift
    flip(store, key, place)
    findings = verify(store).findings
    store.put(key, data)
    assert len(findings) == 1
    return findings[0]


@pytest.mark.parametrize(
    ("text", "shift", "part", "tensors"),
    [
        (b'"__metadata__"', 3, "header: __metadata__", ()),
        (b'"chunks":"', 10, "header: chunks", ()),
        (b'"job":"', 8, "header: job", ()),
        (b'"mesh":"', 9, "header: mesh", ()),
        (b'"state":"', 12, "header: state", ()),
        (b'"model/wk.weight":{', 5, "header: entry", ("model/wk.weight",)),
        (b'"model/wq.weight":{', 40, "header: entry", ("model/wq.weight",)),
    ],
)
def test_a_damaged_header_is_named_by_field_or_tensor(
    text: bytes, shift: int, part: str, tensors: tuple[str, ...]
) -> None:
    finding = header_finding(small(), text, shift)
    assert (finding.part, finding.tensors) == (part, tensors)


def test_padding_and_length_of_a_header_are_named() -> None:
    store = small()
    key = image_key(S10, 0)
    flip(store, key, _header_bytes(store.get(key, 1 << 20)) - 1)
    assert [each.part for each in verify(store).findings] == ["header: padding"]
    store = small()
    flip(store, key, 0)
    assert [each.part for each in verify(store).findings] == ["header: length"]


def test_data_is_checked_behind_a_damaged_header() -> None:
    """The digest proves that the checksums survived, so both kinds of damage are reported."""
    store = small()
    key = image_key(S10, 0)
    data = store.get(key, 1 << 20)
    flip(store, key, data.index(b'"job":"') + 8)
    flip(store, key, len(data) - 1)
    parts = [finding.part.split(",")[0] for finding in verify(store).findings]
    assert parts == ["header: job", "chunk 0"]


def big() -> MemoryStore:
    store = MemoryStore()
    log = begin(store)
    commit(log, write_images(store, S10, BIG))
    return store


def test_a_finding_names_just_the_tensors_of_its_chunk() -> None:
    store = big()
    key = image_key(S10, 0)
    image = parse(
        (data := store.get(key, 1 << 30))[: _header_bytes(data)], key, size_bytes=len(data)
    )
    assert list(image.items) == ["model/a", "model/b"]
    flip(store, key, image.header_bytes + 5)
    flip(store, key, len(data) - 1)
    findings = verify(store).findings
    assert [(each.part.split(",")[0], each.tensors) for each in findings] == [
        ("chunk 0", ("model/a",)),
        ("chunk 1", ("model/a", "model/b")),
    ]
    assert str(findings[0]).startswith(f"{key}: chunk 0, bytes {image.header_bytes} to ")


def test_a_truncated_image_names_what_it_lost() -> None:
    store = big()
    key = image_key(S10, 0)
    damage(store, key, lambda data: data.__delitem__(slice(-1, None)))
    findings = verify(store).findings
    assert [(each.part, each.tensors) for each in findings] == [("size", ("model/b",))]
    damage(store, key, lambda data: data.__delitem__(slice(100, None)))
    findings = verify(store).findings
    assert [(each.part, each.tensors) for each in findings] == [("size", ("model/a", "model/b"))]


def test_trailing_bytes_are_found() -> None:
    store = small()
    damage(store, image_key(S10, 0), lambda data: data.extend(b"x"))
    assert [each.part for each in verify(store).findings] == ["size"]


def test_missing_files_are_named() -> None:
    store = small()
    store.delete(image_key(S10, 1))
    findings = verify(store).findings
    assert [(each.file, each.part) for each in findings] == [(image_key(S10, 1), "file")]
    assert set(findings[0].tensors) <= set(TENSORS)
    assert findings[0].tensors
    store.delete(manifest_key(S10))
    assert [each.file for each in verify(store).findings] == [manifest_key(S10)]


def test_a_missing_and_a_damaged_entry_are_both_named_and_the_rest_is_read() -> None:
    store = MemoryStore()
    begin(store, 10, 20)
    store.delete(entry_key(2))
    flip(store, entry_key(3), 50)
    report = verify(store)
    assert [(each.file, each.part) for each in report.findings] == [
        (entry_key(2), "file"),
        (entry_key(3), "entry"),
    ]
    assert report.entries == 2


def test_an_image_that_does_not_agree_with_the_manifests_plan_is_found() -> None:
    """Both are whole by their own checksums: only comparing them shows that they differ."""
    store = MemoryStore()
    log = begin(store)
    manifest = write_images(store, S10)
    key = image_key(S10, 0)
    data = store.get(key, 1 << 20)
    there = parse(data[: _header_bytes(data)], key)
    other = build(
        "run-b",
        there.state,
        there.rank,
        there.mesh,
        there.plan_digest,
        {name: (item.dtype.name, item.shape, item.box) for name, item in there.items.items()},
    )
    sealed = seal(other, there.digests)
    store.put(key, sealed + data[there.header_bytes :])
    changed = msgspec.structs.replace(
        manifest, images=(image_record(other, sealed), *manifest.images[1:])
    )
    commit(log, changed)
    assert [each.part for each in verify(store).findings] == ["header: job"]


def test_a_manifest_of_another_state_in_this_place_is_found() -> None:
    store = MemoryStore()
    log = begin(store, 10)
    data = store.get(manifest_key(S10), 1 << 20)
    write_images(store, state(1, 20))
    store.put(manifest_key(state(1, 20)), data)
    size_bytes = log.read().live[0].size_bytes
    log.append(
        Commit(state=state(1, 20), manifest_digest=digest128(data), size_bytes=size_bytes + 1)
    )
    parts = [each.part for each in verify(store).findings if "20/manifest" in each.file]
    assert parts == ["state", "images"]


def test_void_checkpoints_are_verified_until_they_are_retired() -> None:
    store = MemoryStore()
    log = begin(store, 10, 20)
    log.append(rewind(S10, "operator asked"))
    flip(store, image_key(state(1, 20), 0), 4100)
    store.delete(image_key(state(1, 20), 1))
    assert [each.part.split(",")[0] for each in verify(store).findings] == ["chunk 0", "file"]
    log.append(retire(state(1, 20)))
    report = verify(store)
    assert report.findings == ()
    assert {each.reason.split(":")[0] for each in report.unreferenced} == {"retired"}


def test_unreferenced_files_are_listed_with_what_they_seem_to_be() -> None:
    store = MemoryStore()
    log = begin(store, 10)
    log.append(generation(2, S10))
    write_images(store, state(1, 15))
    write_images(store, state(2, 20))
    store.put("notes.txt", b"mine")
    store.put(image_key(S10, 5), b"extra")
    report = verify(store)
    assert report.findings == ()
    reasons = {each.file: each.reason.split(":")[0] for each in report.unreferenced}
    assert reasons == {
        image_key(state(1, 15), 0): "never committed, and never will be",
        image_key(state(1, 15), 1): "never committed, and never will be",
        image_key(state(2, 20), 0): "not committed yet",
        image_key(state(2, 20), 1): "not committed yet",
        "notes.txt": "foreign",
        image_key(S10, 5): "its checkpoint's manifest does not name it",
    }


def test_with_a_damaged_log_no_good_file_is_called_never_committed() -> None:
    store = MemoryStore()
    begin(store, 10, 20)
    store.delete(entry_key(2))  # the commit of step 10
    report = verify(store)
    assert [each.file for each in report.findings] == [entry_key(2)]
    reasons = {each.file: each.reason.split(":")[0] for each in report.unreferenced}
    assert set(reasons) >= {manifest_key(S10), image_key(S10, 0), image_key(S10, 1)}
    assert set(reasons.values()) == {"unknown"}


def test_one_checkpoint_can_be_chosen() -> None:
    store = MemoryStore()
    begin(store, 10, 20)
    flip(store, manifest_key(state(1, 20)), 5)

    def choose(lineage: Lineage) -> list[object]:
        return [each for each in lineage.live if each.state == S10]

    report = verify(store, choose)  # type: ignore[arg-type]
    assert report.findings == ()
    assert [each.state for each in report.states] == [S10]
    assert verify(store).findings


def test_progress_ends_at_the_total() -> None:
    seen: list[Progress] = []
    report = verify(big(), on_progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.read_bytes
    assert [each.done_bytes for each in seen] == sorted(each.done_bytes for each in seen)


def test_an_empty_store_verifies() -> None:
    report = verify(MemoryStore())
    assert (report.job, report.entries, report.findings) == (None, 0, ())


def test_nothing_is_changed_by_verifying() -> None:
    store = MemoryStore()
    log = begin(store, 10)
    save(log, state(1, 20))
    before = {info.key: store.get(info.key, 1 << 30) for info in store.list("")}
    verify(store)
    assert {info.key: store.get(info.key, 1 << 30) for info in store.list("")} == before
    data = before[manifest_key(S10)]
    assert decode_manifest(data, "m").state == S10
    assert open_log(store).read() == log.read()

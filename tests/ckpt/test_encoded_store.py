"""Checkpoints that lie encoded in the store: read by every reader, and each wrong byte found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.kit.encoded import READ_BYTES_MAX, STATE, encode_images, make_encoded_store, weights
from tests.kit.make_store import Content, arange, begin, cut, make_store, mesh, split, write_images
from tests.kit.reshards import opened, resharded, same_bits
from tests.kit.states import STATE as SAVED
from tests.kit.states import Layout, register, save_alone
from torch import nn

from keepstep.ckpt.arrays import NUMPY_DTYPES
from keepstep.ckpt.candidates import Place
from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.commit import commit
from keepstep.ckpt.copies import Copies, Course
from keepstep.ckpt.diff import diff
from keepstep.ckpt.encoding import SPAN_BYTES, check_encoded
from keepstep.ckpt.errors import Corrupt, FormatError, NotCommitted
from keepstep.ckpt.gc import collect
from keepstep.ckpt.keys import encoded_key, image_key, manifest_key, stored_key
from keepstep.ckpt.layout import Layout as Target
from keepstep.ckpt.load import stage
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
)
from keepstep.ckpt.mosaic import Distance
from keepstep.ckpt.plain_view import plain_view
from keepstep.ckpt.presence import is_present
from keepstep.ckpt.region import Box
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.sources import Origin, Sources, origin_of
from keepstep.ckpt.structure import merge_structures
from keepstep.ckpt.tiers import Tier
from keepstep.ckpt.verify import verify
from keepstep.storage.errors import NotFound, Permanent, TooLarge, Truncated
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

GRID = mesh(pp=1, dp_replicate=1, dp_shard=3, tp=2)
SHARDED = split("tp:0", "dp_shard:0")
KEY = encoded_key(STATE, 0)

# Three spans and a little more; the small tensors lie behind.
BIG = Content(
    {
        "model/w": weights((2 * SPAN_BYTES // 4 + 70_001,)),
        "model/half": weights((3_000_001,), 1).astype(NUMPY_DTYPES["BF16"]),
        "model/small": arange((5, 3), "BF16"),
        "optimizer/step": arange((), "I64"),
    },
    mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1),
)


@pytest.fixture(scope="module")
def plain() -> MemoryStore:
    store = MemoryStore()
    make_store(store, BIG)
    return store


@pytest.fixture(scope="module")
def whole() -> tuple[MemoryStore, Manifest]:
    store = MemoryStore()
    return store, make_encoded_store(store, BIG)


@pytest.fixture
def copied(whole: tuple[MemoryStore, Manifest]) -> MemoryStore:
    """The encoded store, to be damaged."""
    store = MemoryStore()
    for info in whole[0].list(""):
        store.put(info.key, whole[0].get(info.key, READ_BYTES_MAX))
    return store


def change(store: Store, key: str, edit: Callable[[bytearray], object]) -> None:
    data = bytearray(store.get(key, READ_BYTES_MAX))
    edit(data)
    store.put(key, bytes(data))


def flip(store: Store, key: str, offset: int) -> None:
    def edit(data: bytearray) -> None:
        data[offset] ^= 1

    change(store, key, edit)


def findings(store: Store) -> list[str]:
    return list(map(str, verify(store).findings))


# Reading.


@pytest.mark.parametrize("dtype", sorted(NUMPY_DTYPES))
@pytest.mark.parametrize("shape", [(13, 7), (201, 133)])
def test_every_dtype_and_an_uneven_layout_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = arange(shape, dtype)
    content = Content({"t": array}, GRID, {"t": SHARDED}, dtypes={"t": dtype})
    store = MemoryStore()
    manifest = make_encoded_store(store, content)
    assert manifest.encoded
    assert findings(store) == []
    found = opened(store).read("t")
    assert found.tobytes() == array.tobytes()
    box = Box((3, 2), (7, 4))
    assert opened(store).read("t", box).tobytes() == cut(array, box).tobytes()


def test_what_is_stored_is_smaller_and_the_plain_image_is_not_there(
    plain: MemoryStore, whole: tuple[MemoryStore, Manifest]
) -> None:
    store, manifest = whole
    size_bytes = manifest.images[0].size_bytes
    assert store.stat(KEY).size_bytes == manifest.stored_bytes()[0] < 0.86 * size_bytes
    with pytest.raises(NotFound):
        store.stat(image_key(STATE, 0))
    assert is_present(store, Log(store).read().live[0])
    assert findings(store) == []
    assert verify(store).unreferenced == ()
    assert [span.planes for span in manifest.encoded[0].spans] == [4, 4, 2]


def test_any_range_is_that_of_the_plain_image(
    plain: MemoryStore, whole: tuple[MemoryStore, Manifest]
) -> None:
    key = image_key(STATE, 0)
    data = plain.get(key, READ_BYTES_MAX)
    view = plain_view(*whole)
    assert view.stat(key).size_bytes == view.stat(KEY).size_bytes == len(data)
    assert view.get(key, len(data)) == view.get(KEY, len(data)) == data
    with pytest.raises(TooLarge):
        view.get(key, len(data) - 1)
    header = whole[1].images[0].header_bytes
    edges = [0, 1, header, header + SPAN_BYTES, header + 2 * SPAN_BYTES, len(data)]
    rng = np.random.default_rng(0)
    for _ in range(30):
        one, other = (int(rng.choice(edges)) + int(rng.integers(-9, 10)) for _ in range(2))
        start, end = sorted((min(max(one, 0), len(data)), min(max(other, 0), len(data))))
        assert view.get_range(key, start, end - start) == data[start:end]
        target = bytearray(end - start)
        view.read_into(KEY, start, memoryview(target))
        assert bytes(target) == data[start:end]
    with pytest.raises(Truncated):
        view.get_range(key, len(data) - 1, 2)
    for offset, length in ((-1, 4), (0, -1)):
        with pytest.raises(ValueError):
            view.get_range(key, offset, length)


def test_the_view_passes_all_else_on_and_takes_nothing(
    whole: tuple[MemoryStore, Manifest],
) -> None:
    store, manifest = whole
    view = plain_view(store, manifest)
    key = manifest_key(STATE)
    assert (view.url, view.capabilities) == (store.url, store.capabilities)
    assert view.get(key, 1 << 20) == store.get(key, 1 << 20)
    assert view.get_range(key, 3, 9) == store.get_range(key, 3, 9)
    assert view.stat(key) == store.stat(key)
    assert list(view.list("")) == list(store.list(""))
    target = bytearray(4)
    view.read_into(key, 2, memoryview(target))
    assert bytes(target) == store.get_range(key, 2, 4)
    for refused in (
        lambda: view.put("a", b""),
        lambda: view.put_stream("a", [], 0),
        lambda: view.put_if_absent("a", b""),
        lambda: view.delete(KEY),
        lambda: view.sweep(store.stat(KEY)),
    ):
        with pytest.raises(Permanent, match="only be read"):
            refused()
    assert list(view.leftovers("")) == []


def test_plain_checkpoints_are_read_where_they_lie(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    content = Content({"t": arange((7, 3))}, GRID, {"t": SHARDED})
    make_store(store, content)
    manifest = opened(store).manifest
    assert plain_view(store, manifest) is store
    assert origin_of(Place(Tier.STORE, ""), plain_view(store, manifest)).is_in_place
    assert b"encoded" not in encode_manifest(manifest)


def test_diff_and_reshard_read_it(plain: MemoryStore, whole: tuple[MemoryStore, Manifest]) -> None:
    found = diff(opened(plain), opened(whole[0]))
    assert found.is_same
    assert found.identical == len(BIG.tensors)
    there = opened(resharded(whole[0], Target(2, 2, 1))[0])
    for name, array in BIG.tensors.items():
        assert same_bits(there.read(name), array), name


def test_a_model_and_its_optimizer_are_restored_from_it() -> None:
    def run(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 50).to(torch.bfloat16))

    first, second = run(1), run(2)
    plain, store = MemoryStore(), MemoryStore()
    manifest = save_alone(register(first, None, Layout(), 0), plain)
    manifest = encode_images(store, plain, manifest)
    assert manifest.state == SAVED
    assert manifest.encoded
    registry = register(second, None, Layout(), 0)
    structure = merge_structures([registry.structure()])
    with stage(registry, structure, manifest, store) as staged:
        staged.apply()
    for (name, one), (_, other) in zip(
        first.state_dict().items(), second.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name


# What pays.


def test_noise_is_stored_as_it_is_and_beside_weights_too() -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(4 * SPAN_BYTES), np.float32)
    grid = mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    store = MemoryStore()
    manifest = make_encoded_store(store, Content({"noise": noise}, grid))
    assert manifest.encoded == ()
    assert store.stat(image_key(STATE, 0)).size_bytes == manifest.images[0].size_bytes
    tensors = {"a": noise[: SPAN_BYTES // 4], "b": weights((SPAN_BYTES // 2,))}
    manifest = make_encoded_store(MemoryStore(), Content(tensors, grid))
    spans = manifest.encoded[0].spans
    assert [span.planes for span in spans] == [1, 4, 4]
    assert spans[0].first_bytes > SPAN_BYTES
    assert findings(store) == []


def test_what_zstd_makes_small_alone_has_no_planes() -> None:
    zeros = np.zeros(SPAN_BYTES // 4, np.float32)
    content = Content({"t": zeros}, mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1))
    store = MemoryStore()
    manifest = make_encoded_store(store, content)
    assert [span.planes for span in manifest.encoded[0].spans] == [1]
    assert store.stat(KEY).size_bytes < 10_000


def test_the_same_image_is_encoded_alike_each_time() -> None:
    content = Content({"t": weights((300, 301))}, GRID, {"t": SHARDED})
    stores = [MemoryStore(), MemoryStore()]
    assert make_encoded_store(stores[0], content) == make_encoded_store(stores[1], content)
    assert stores[0].get(KEY, 1 << 24) == stores[1].get(KEY, 1 << 24)


# Damage.


def test_every_flipped_byte_of_a_little_image_is_found() -> None:
    content = Content({"t": weights((12, 30))}, mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1))
    store = MemoryStore()
    make_encoded_store(store, content)
    good = store.get(KEY, 1 << 20)
    for place in range(len(good)):
        flip(store, KEY, place)
        found = verify(store).findings
        assert found, place
        assert {finding.file for finding in found} == {KEY}
        store.put(KEY, good)


def test_a_flipped_byte_is_told_with_its_tensor_and_never_given_out(copied: MemoryStore) -> None:
    manifest = opened(copied).manifest
    spans = manifest.encoded[0].spans
    # In the exponents of the second span, which then decode otherwise, or not at all.
    flip(copied, KEY, manifest.encoded[0].header_bytes + spans[0].stored_bytes + 5_000)
    with pytest.raises(Corrupt) as caught:
        opened(copied).read("model/w")
    assert (caught.value.file, caught.value.tensor) == (KEY, "model/w")
    assert caught.value.offset == manifest.images[0].header_bytes + SPAN_BYTES
    assert same_bits(opened(copied).read("model/half"), BIG.tensors["model/half"])
    found = verify(copied).findings
    assert {finding.file for finding in found} == {KEY}
    assert {name for finding in found for name in finding.tensors} == {"model/w"}
    assert found[-1].part == "frames"


def test_a_flipped_byte_of_a_plain_plane_hurts_the_chunks_that_it_lies_in(
    copied: MemoryStore,
) -> None:
    manifest = opened(copied).manifest
    encoded = manifest.encoded[0]
    flip(copied, KEY, encoded.header_bytes + encoded.spans[0].first_bytes + 1_000)
    chunks = [finding for finding in verify(copied).findings if finding.tensors]
    assert [finding.part.split(",")[0] for finding in chunks] == ["chunk 0"]


def test_a_header_that_does_not_decode_is_told(copied: MemoryStore) -> None:
    flip(copied, KEY, 0)
    with pytest.raises(Corrupt, match="header"):
        opened(copied).read("model/w")
    assert any("header" in finding for finding in findings(copied))


@pytest.mark.parametrize("edit", [lambda data: data.pop(), lambda data: data.append(0)])
def test_an_object_of_another_length_is_told(
    copied: MemoryStore, edit: Callable[[bytearray], object]
) -> None:
    change(copied, KEY, edit)
    with pytest.raises(Truncated, match="by its frames in the manifest"):
        opened(copied).read("model/w")
    assert any("by its frames" in finding for finding in findings(copied))
    assert not is_present(copied, Log(copied).read().live[0])


def test_a_missing_object_is_told(copied: MemoryStore) -> None:
    copied.delete(KEY)
    with pytest.raises(NotFound):
        opened(copied).read("model/w")
    assert any(f"{KEY}: file" in finding for finding in findings(copied))
    assert not is_present(copied, Log(copied).read().live[0])


def test_wrong_chunks_come_from_another_copy_and_are_told(
    plain: MemoryStore, copied: MemoryStore
) -> None:
    manifest = opened(copied).manifest
    encoded, record = manifest.encoded[0], manifest.images[0]
    flip(copied, KEY, encoded.header_bytes + encoded.spans[0].stored_bytes + 5_000)
    near, far = Place(Tier.STORE, ""), Place(Tier.PEER, "b")
    course = Course(sleep=lambda _: None)
    origins = [origin_of(near, plain_view(copied, manifest)), Origin(far, plain, False)]
    copies = Copies(STATE, record, origins, course)
    data_bytes = record.size_bytes - record.header_bytes
    target = bytearray(data_bytes)
    copies.read_into(0, -(-data_bytes // CHUNK_BYTES), memoryview(target))
    data = plain.get(image_key(STATE, 0), READ_BYTES_MAX)
    assert bytes(target) == data[record.header_bytes :]
    assert {fault.place for fault in course.faults} == {near}
    first = course.faults[0].error
    assert isinstance(first, Corrupt)
    assert (first.tensor, first.offset) == ("model/w", record.header_bytes + SPAN_BYTES)


def test_sources_read_the_store_as_the_manifest_says(whole: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = whole
    with Sources(Distance("h0", {}), store=store) as sources:
        sources.see(manifest)
        (origin,) = sources.origins([Place(Tier.STORE, "")], 0)
        size_bytes = manifest.images[0].size_bytes
        assert origin.store.stat(image_key(STATE, 0)).size_bytes == size_bytes
        assert not origin.is_in_place


# The manifest.


def test_the_manifest_comes_back(whole: tuple[MemoryStore, Manifest]) -> None:
    _, manifest = whole
    assert decode_manifest(encode_manifest(manifest), "manifest") == manifest
    assert stored_key(manifest, 0) == KEY


def _first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["encoded"][0]
    return found


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda d: _first(d).update(rank=1), "encoded[0].rank"),
        (lambda d: _first(d).update(rank=-1), "encoded[0].rank"),
        (lambda d: d["encoded"].append(_first(d)), "encoded[1].rank"),
        (lambda d: _first(d).update(header_bytes=0), "encoded[0].header_bytes"),
        (lambda d: _first(d).update(header_bytes=9_000), "encoded[0].header_bytes"),
        (lambda d: _first(d).update(digest="AB" * 16), "encoded[0].digest"),
        (lambda d: _first(d)["spans"].pop(), "encoded[0].spans"),
        (lambda d: _first(d)["spans"].append([1, 1, 0]), "encoded[0].spans"),
        (lambda d: _first(d).update(spans=[]), "encoded[0].spans"),
        (lambda d: _first(d)["spans"][1].__setitem__(0, 0), "encoded[0].spans[1][0]"),
        (lambda d: _first(d)["spans"][1].__setitem__(0, 3), "encoded[0].spans[1][0]"),
        (lambda d: _first(d)["spans"][1].__setitem__(0, -4), "encoded[0].spans[1][0]"),
        (lambda d: _first(d)["spans"][1].__setitem__(1, 0), "encoded[0].spans[1][1]"),
        (lambda d: _first(d)["spans"][1].__setitem__(1, 1 << 40), "encoded[0].spans[1][1]"),
        (lambda d: _first(d)["spans"][1].__setitem__(2, 0), "encoded[0].spans[1][2]"),
        (lambda d: _first(d)["spans"][1].__setitem__(2, 1 << 40), "encoded[0].spans[1][2]"),
        (lambda d: _first(d)["spans"].__setitem__(1, [1, 5, 5]), "encoded[0].spans[1][2]"),
        (lambda d: _first(d)["spans"][1].append(1), ""),  # msgspec does not say where
        (lambda d: _first(d)["spans"][1].pop(), "encoded[0].spans[1]"),
        (lambda d: _first(d)["spans"][1].__setitem__(1, 1.5), "encoded[0].spans[1][1]"),
        (lambda d: _first(d).update(window=1), "encoded[0]"),
        (lambda d: _first(d).pop("digest"), "encoded[0]"),
    ],
)
def test_frames_that_cannot_be_are_refused_with_their_field(
    whole: tuple[MemoryStore, Manifest], edit: Callable[[dict[str, Any]], object], field: str
) -> None:
    document = json.loads(encode_manifest(whole[1]))
    edit(document)
    with pytest.raises(FormatError) as caught:
        decode_manifest(json.dumps(document).encode(), "manifest")
    assert caught.value.field == field


def test_more_planes_than_bytes_are_refused(whole: tuple[MemoryStore, Manifest]) -> None:
    encoded = whole[1].encoded[0]
    one = msgspec.structs.replace(encoded.spans[0], planes=8, first_bytes=10, rest_bytes=10)
    with pytest.raises(FormatError, match="not more than the 5 bytes"):
        check_encoded(msgspec.structs.replace(encoded, spans=(one,)), 4096, 5, "f", "encoded")


def test_frames_that_say_other_lengths_than_are_stored_are_no_commit() -> None:
    content = Content({"t": weights((300, 301))}, GRID, {"t": SHARDED})
    store, plain = MemoryStore(), MemoryStore()
    log = begin(store, content.mesh)
    manifest = encode_images(store, plain, write_images(plain, content, STATE))
    flip_length = store.get(KEY, 1 << 24)[:-1]
    store.put(KEY, flip_length)
    with pytest.raises(NotCommitted, match=r"safetensors\.zst has \d+ bytes, rank 0 wrote"):
        commit(log, manifest)
    store.delete(KEY)
    with pytest.raises(NotCommitted, match=r"safetensors\.zst \(rank 0\) is missing"):
        commit(log, manifest)


def test_a_retired_state_goes_with_all_its_files_and_a_plain_twin_is_told() -> None:
    content = Content({"t": weights((300, 301))}, GRID, {"t": SHARDED})
    store = MemoryStore()
    make_encoded_store(store, content)
    store.put(image_key(STATE, 0), b"left by a keeper that was told not to compress")
    (beside,) = verify(store).unreferenced
    assert beside.file == image_key(STATE, 0)
    log = Log(store, job="kit")
    log.continue_term(1)
    plain = write_images(store, content, msgspec.structs.replace(STATE, step=2))
    commit(log, plain)
    collect(log, Policy(keep_last=1))
    assert {info.key for info in store.list("states/")} == {
        manifest_key(plain.state),
        *(image_key(plain.state, image.rank) for image in plain.images),
    }

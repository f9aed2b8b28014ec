"""Images: what is built is what is read, by us and by safetensors; sizes, order and places."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.structures import Drawn, structures

from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_digests, digest128
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.errors import BadName, NotRepresentable, PlacementError
from keepstep.ckpt.image import (
    CHUNKS_AT,
    ImageHeader,
    build,
    image_record,
    seal,
)
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.manifest import ALIGNMENT_BYTES, ImageRecord, State
from keepstep.ckpt.placement import Mesh, MeshAxis, mesh_size
from keepstep.ckpt.plan import Plan, plan_digest
from keepstep.ckpt.region import Box, whole

Items = dict[str, tuple[str, tuple[int, ...], Box]]

_MESH = Mesh((MeshAxis("dp_shard", 2), MeshAxis("tp", 4)))
_DIGEST = "0123456789abcdef" * 2
_STATE = State(3, 120)


def _build(items: Items, **changes: object) -> ImageHeader:
    arguments: dict[str, object] = {
        "job": "demo",
        "state": _STATE,
        "rank": 5,
        "mesh": _MESH,
        "plan_digest": _DIGEST,
        "items": items,
    }
    return build(**{**arguments, **changes})  # type: ignore[arg-type]


def _file(header: ImageHeader) -> bytes:
    """A whole image whose data is a pattern that differs from chunk to chunk."""
    data = b"".join(
        bytes([1 + index % 251]) * item.size_bytes
        for index, item in enumerate(header.items.values())
    )
    return seal(header, chunk_digests(data)) + data


def _one_of_each() -> Items:
    shape = (6, 4)
    return {
        f"model/{name.lower()}": (name, shape, Box((2, 0), (3, 4))) for name in reversed(DTYPES)
    }


@settings(max_examples=40)
@given(structures(), st.integers(0, 999_999), st.integers(0, 10**12 - 1))
def test_what_was_built_is_parsed_again(drawn: Drawn, generation: int, step: int) -> None:
    plan = Plan(drawn.mesh, drawn.placements, drawn.tensors)
    digest = plan_digest(drawn.mesh, drawn.placements, drawn.tensors)
    for rank in range(mesh_size(drawn.mesh)):
        items = {
            name: (drawn.tensors[name].dtype, drawn.tensors[name].shape, box)
            for name, box in plan.owned(rank).items()
        }
        state = State(generation, step)
        header = build("job.1", state, rank, drawn.mesh, digest, items)
        file = _file(header)
        parsed = parse(file[: header.header_bytes], "r", len(file))
        assert (parsed.job, parsed.state, parsed.rank) == ("job.1", state, rank)
        assert (parsed.mesh, parsed.plan_digest) == (drawn.mesh, digest)
        assert parsed.items == header.items
        assert list(parsed.digests) == chunk_digests(file[header.header_bytes :])
        found = dict(safetensors.deserialize(file))
        assert {name: len(entry["data"]) for name, entry in found.items()} == {
            name: item.size_bytes for name, item in header.items.items()
        }


def test_safetensors_reads_every_dtype_and_those_that_it_lacks_as_bytes(tmp_path: Path) -> None:
    file = _file(_build(_one_of_each()))
    (tmp_path / "r.safetensors").write_bytes(file)
    found = dict(safetensors.deserialize(file))
    for index, (name, item) in enumerate(_build(_one_of_each()).items.items()):
        shape = [3, 4] if item.dtype.is_native else [12 * item.dtype.itemsize]
        assert found[name]["dtype"] == item.dtype.stored
        assert found[name]["shape"] == shape
        assert bytes(found[name]["data"]) == bytes([1 + index]) * item.size_bytes
    with safetensors.safe_open(tmp_path / "r.safetensors", "numpy") as opened:
        assert set(opened.keys()) == set(_one_of_each())
        metadata = opened.metadata()
    assert metadata["job"] == "demo"
    assert metadata["state"] == "g000003/s000000000120"
    assert metadata["mesh"] == "dp_shard=2,tp=4"


def test_an_image_without_tensors_or_with_empty_ones_is_a_valid_file() -> None:
    for items in ({}, {"empty": ("F32", (0, 3), Box((0, 0), (0, 3)))}):
        header = _build(items)
        file = _file(header)
        assert header.data_bytes == 0
        assert len(file) == ALIGNMENT_BYTES
        assert parse(file, "r", len(file)).items == header.items
        assert len(safetensors.deserialize(file)) == len(items)


def test_data_is_aligned_and_ordered_by_item_size_smallness_and_name_without_holes() -> None:
    header = _build(_one_of_each())
    assert header.header_bytes % ALIGNMENT_BYTES == 0
    keys = [
        (-item.dtype.itemsize, item.size_bytes < 65_536, name)
        for name, item in header.items.items()
    ]
    assert keys == sorted(keys)
    end = 0
    for item in header.items.values():
        assert item.offset == end
        assert item.offset % item.dtype.itemsize == 0
        end += item.size_bytes
    assert end == header.data_bytes


def test_headers_near_a_pages_border_are_padded_up_to_it() -> None:
    sizes = set()
    for length in range(950, 1_000):
        names = [letter * 900 for letter in "abc"] + ["d" * length]
        header = _build({name: ("U8", (1,), whole((1,))) for name in names})
        sizes.add((header.header_bytes, len(header.encoded.rstrip(b" "))))
        assert len(safetensors.deserialize(_file(header))) == 4
    texts = {text for _, text in sizes}
    assert {ALIGNMENT_BYTES - 1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1} <= texts
    assert all(size == -(-text // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size, text in sizes)


def test_the_same_header_at_another_state_is_what_building_it_there_gives() -> None:
    header = _build(_one_of_each())
    sealed = seal(header, ["f" * 16])
    parsed = parse(sealed, "r")
    later = State(999_999, 10**12 - 1)
    assert parsed.at(later) == _build(_one_of_each(), state=later)
    assert header.at(later).at(_STATE) == header


def test_sealing_changes_only_the_checksums() -> None:
    header = _build({"w": ("U8", (3 * CHUNK_BYTES + 1,), whole((3 * CHUNK_BYTES + 1,)))})
    digests = [f"{index:016x}" for index in range(1, 5)]
    sealed = seal(header, digests)
    assert len(sealed) == header.header_bytes
    assert sealed[CHUNKS_AT : CHUNKS_AT + 64] == "".join(digests).encode()
    assert sealed[:CHUNKS_AT] == header.encoded[:CHUNKS_AT]
    assert sealed[CHUNKS_AT + 64 :] == header.encoded[CHUNKS_AT + 64 :]


@pytest.mark.parametrize("digests", [[], ["0" * 16] * 2, ["0" * 15], ["0" * 17]])
def test_sealing_with_another_number_of_checksums_is_refused(digests: list[str]) -> None:
    header = _build({"w": ("U8", (9,), whole((9,)))})
    with pytest.raises(ValueError, match="for the 1 chunks"):
        seal(header, digests)


def test_any_changed_byte_of_a_sealed_header_changes_the_digest_in_its_record() -> None:
    header = _build({"w": ("F32", (9,), whole((9,)))})
    sealed = seal(header, ["a" * 16])
    record = image_record(header, sealed)
    assert record == ImageRecord(5, 4096 + 36, 4096, digest128(sealed))
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1 << place % 8
        assert digest128(changed) != record.digest


def test_names_at_a_place_in_the_data_are_those_of_the_tensors_with_bytes_there() -> None:
    items: Items = {
        "a": ("F64", (2,), whole((2,))),
        "b": ("F32", (0,), whole((0,))),
        "c": ("F32", (3,), whole((3,))),
        "d": ("U8", (5,), whole((5,))),
    }
    header = _build(items)
    assert header.data_bytes == 33
    for start in range(33):
        for end in range(start + 1, 34):
            expected = [
                name
                for name, item in header.items.items()
                if item.size_bytes and item.offset < end and item.offset + item.size_bytes > start
            ]
            assert header.names_at(start, end - start) == expected


def _layers(count: int) -> Items:
    return {
        f"optimizer/layers.{i}.feed_forward.w1.weight/exp_avg_sq": (
            "F32",
            (14336, 4096),
            Box((1792, 2048), (1, 512)),
        )
        for i in range(count)
    }


def test_a_tensor_costs_at_most_250_bytes_of_header() -> None:
    header = _build(_layers(5_000))
    assert (header.header_bytes - ALIGNMENT_BYTES) / 5_000 <= 250


def test_building_a_header_of_5000_tensors_takes_milliseconds() -> None:
    items = _layers(5_000)
    taken_s = []
    for _ in range(5):
        start = time.process_time()
        header = _build(items)
        built = time.process_time()
        header.at(State(4, 121))
        taken_s.append((built - start, time.process_time() - built))
    # Measured 14 and 0.2 ms: the bounds leave room for a busy machine.
    assert min(build_s for build_s, _ in taken_s) < 0.1
    assert min(at_s for _, at_s in taken_s) < 0.01


def test_images_of_many_gigabytes_have_exact_offsets() -> None:
    rows = 1 << 31
    header = _build(
        {"big": ("F32", (rows, 2), Box((5, 0), (rows - 5, 2))), "a": ("U8", (3,), whole((3,)))}
    )
    assert header.items["a"].offset == (rows - 5) * 8
    sealed = seal(header, ["0" * 16] * (-(-header.data_bytes // CHUNK_BYTES)))
    assert parse(sealed, "r", header.size_bytes).items == header.items


@pytest.mark.parametrize(
    ("name", "item", "error", "reason"),
    [
        ("w", ("F99", (1,), whole((1,))), NotRepresentable, "no dtype 'F99'"),
        ("w", ("F32", (4,), Box((2,), (3,))), PlacementError, "is not inside shape"),
        ("w", ("F32", (4,), Box((-1,), (3,))), PlacementError, "is not inside shape"),
        ("w", ("F32", (4,), Box((1,), (-1,))), PlacementError, "is not inside shape"),
        ("w", ("F32", (4,), whole((4, 1))), PlacementError, "different numbers of dims"),
        ("w", ("F32", (1,) * 65, whole((1,) * 65)), PlacementError, "has 65 dims"),
        ("w", ("U8", (2**49,), whole((2**49,))), PlacementError, "a dim is over"),
        ("w", ("U8", (2**30,) * 2, whole((2**30,) * 2)), PlacementError, "an image of"),
        ("", ("F32", (1,), whole((1,))), BadName, "is empty"),
        ("../w", ("F32", (1,), whole((1,))), BadName, r"path part '\.\.'"),
        ("__metadata__", ("F32", (1,), whole((1,))), BadName, "reserved"),
    ],
)
def test_what_an_image_cannot_hold_is_refused_by_name(
    name: str, item: tuple[str, tuple[int, ...], Box], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        _build({name: item})


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "a/b"},
        {"rank": 8},
        {"rank": -1},
        {"plan_digest": "x" * 32},
        {"state": State(10**6, 0)},
        {"state": State(0, 10**12)},
        {"state": State(0, -1)},
        {"mesh": Mesh((MeshAxis("a=b", 8),))},
    ],
)
def test_a_header_field_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        _build({}, **changes)


def test_the_bytes_of_format_1_do_not_change() -> None:
    """Such files exist: a change here needs a new format version."""
    items: Items = {
        "model/w": ("BF16", (4, 3), Box((2, 0), (2, 3))),
        'model/é"': ("F32", (), Box((), ())),
        "model/z": ("C128", (2,), Box((1,), (1,))),
    }
    header = _build(items)
    text = seal(header, ["00ff" * 4])
    assert int.from_bytes(text[:8], "little") == 4088
    assert json.loads(text[8:]) == {
        "__metadata__": {
            "chunks": "00ff00ff00ff00ff",
            "job": "demo",
            "keepstep": "1",
            "mesh": "dp_shard=2,tp=4",
            "plan": _DIGEST,
            "rank": "5",
            "state": "g000003/s000000000120",
            "tensors": '[[[2],[1],[1],"C128"],[],[[4,3],[2,0]]]',
        },
        "model/z": {"data_offsets": [0, 16], "dtype": "U8", "shape": [16]},
        'model/é"': {"data_offsets": [16, 20], "dtype": "F32", "shape": []},
        "model/w": {"data_offsets": [20, 32], "dtype": "BF16", "shape": [2, 3]},
    }
    assert digest128(text) == "ace8973343ee9c2dbf2f7a1b64d2e6e2"
    assert header_size(text[:8], "r", len(text) + 32) == 4096

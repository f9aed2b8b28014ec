"""Manifests: what is encoded is decoded; what cannot be is refused with file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.structures import Drawn, structures

from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.errors import Foreign, FormatError, NewerVersion, NotRepresentable
from keepstep.ckpt.manifest import (
    ImageRecord,
    Manifest,
    State,
    TensorSpec,
    decode_manifest,
    encode_manifest,
)
from keepstep.ckpt.placement import Mesh, MeshAxis, Pin, Placement, Split
from keepstep.ckpt.plan import plan_digest

FILE = "states/g000003/s000000000120/manifest.json"
_MESH = Mesh((MeshAxis("pp", 2), MeshAxis("tp", 2)))
_PLACEMENTS = (Placement((Split("tp", 0),), (Pin("pp", (0,)),)), Placement())
_TENSORS = {
    "model/w": TensorSpec((7, 3), "F32", 0),
    "model/norm": TensorSpec((), "F64", 1),
    "model/none": TensorSpec((0, 5), "BF16", 1),
}


def _manifest(**changes: Any) -> Manifest:  # noqa: ANN401
    fields: dict[str, Any] = {
        "format": 1,
        "job": "demo",
        "state": State(3, 120),
        "mesh": _MESH,
        "placements": _PLACEMENTS,
        "tensors": _TENSORS,
        "aliases": {"model/output": "model/w"},
        "values": {"cursor": 12, "lr": 0.1, "text": "é", "nested": [1, {"a": None}]},
        "plan_digest": plan_digest(_MESH, _PLACEMENTS, _TENSORS),
        "images": (
            ImageRecord(0, 4096 + 48, 4096, "a" * 32),
            ImageRecord(1, 8192 + 36, 8192, "b" * 32),
            ImageRecord(2, 4096 + 8, 4096, "c" * 32),
        ),
    }
    return Manifest(**{**fields, **changes})


@given(structures(), st.integers(0, 2**53))
def test_any_structure_comes_back_and_order_makes_no_difference(drawn: Drawn, cursor: int) -> None:
    data_bytes = sum(
        prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in drawn.tensors.values()
    )
    image = ImageRecord(0, 4096 + data_bytes, 4096, "a" * 32)
    manifest = _manifest(
        mesh=drawn.mesh,
        placements=drawn.placements,
        tensors=drawn.tensors,
        aliases={},
        values={"cursor": cursor},
        plan_digest=plan_digest(drawn.mesh, drawn.placements, drawn.tensors),
        images=(image,) if data_bytes else (),
    )
    data = encode_manifest(manifest)
    assert decode_manifest(data, FILE) == manifest
    backwards = dict(reversed(drawn.tensors.items()))
    assert encode_manifest(msgspec.structs.replace(manifest, tensors=backwards)) == data


def test_a_manifest_comes_back_and_is_json_with_sorted_keys() -> None:
    data = encode_manifest(_manifest())
    assert decode_manifest(data, FILE) == _manifest()
    text = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert text.encode() == data


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": 0}, "format"),
        ({"job": "a/b"}, "job"),
        ({"state": State(-1, 0)}, "state.generation"),
        ({"state": State(0, 10**12)}, "state.step"),
        ({"mesh": Mesh((MeshAxis("tp", 2),))}, "tensors"),
        ({"placements": _PLACEMENTS[:1]}, "tensors"),
        ({"tensors": {"../w": TensorSpec((), "F64", 1)}}, "tensors['../w']"),
        ({"tensors": {"w": TensorSpec((-1,), "F64", 1)}}, "tensors['w'].shape"),
        ({"tensors": {"w": TensorSpec((2**60,), "F64", 1)}}, "tensors['w'].shape"),
        ({"tensors": {"w": TensorSpec((1,) * 65, "F64", 1)}}, "tensors['w'].shape"),
        ({"aliases": {"a": "nowhere"}}, "aliases['a']"),
        ({"aliases": {"model/w": "model/norm"}}, "aliases['model/w']"),
        ({"aliases": {"/a": "model/w"}}, "aliases['/a']"),
        ({"plan_digest": "A" * 32}, "plan_digest"),
        ({"plan_digest": "a" * 32}, "plan_digest"),
        ({"images": ()}, "images"),
        ({"images": (ImageRecord(4, 4196, 4096, "a" * 32),)}, "images[0].rank"),
        ({"images": (ImageRecord(-1, 4196, 4096, "a" * 32),)}, "images[0].rank"),
        ({"images": (ImageRecord(0, 4096, 4096, "a" * 32),)}, "images[0].size_bytes"),
        ({"images": (ImageRecord(0, 4197, 4097, "a" * 32),)}, "images[0].header_bytes"),
        ({"images": (ImageRecord(0, 4197, 0, "a" * 32),)}, "images[0].header_bytes"),
        ({"images": (ImageRecord(0, 1 << 40, 1 << 30, "a" * 32),)}, "images[0].header_bytes"),
        ({"images": (ImageRecord(0, 4197, 4096, "a" * 31),)}, "images[0].digest"),
        ({"images": (ImageRecord(1, 4100, 4096, "a" * 32),) * 2}, "images[1].rank"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused_when_written_and_when_read(
    changes: dict[str, Any], field: str
) -> None:
    manifest = _manifest(**changes)
    with pytest.raises(FormatError) as written:
        encode_manifest(manifest)
    with pytest.raises(FormatError) as read:
        decode_manifest(msgspec.json.encode(manifest, order="sorted"), FILE)
    assert written.value.field == read.value.field == field
    assert read.value.file == FILE
    assert read.value.expected
    assert read.value.found


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**64, {1: 2}, b"x", {"a": object()}, "\ud800"]
)
def test_values_that_json_does_not_have_are_refused(value: object) -> None:
    with pytest.raises(NotRepresentable, match="values"):
        encode_manifest(_manifest(values={"x": value}))


def _edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(encode_manifest(_manifest()))
    edit(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("edit", "field", "expected", "found"),
    [
        (lambda d: d.pop("mesh"), "", "what the format says", "missing required field `mesh`"),
        (lambda d: d.update(extra=1), "", "what the format says", "unknown field `extra`"),
        (lambda d: d.update(state=5), "state", "`object`", "`int`"),
        (
            lambda d: d["tensors"]["model/w"].update(shape=[1.5]),
            "tensors['model/w'].shape[0]",
            "`int`",
            "`float`",
        ),
        (lambda d: d["images"][1].update(rank="1"), "images[1].rank", "`int`", "`str`"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_path(
    edit: Callable[[dict[str, Any]], object], field: str, expected: str, found: str
) -> None:
    with pytest.raises(FormatError) as caught:
        decode_manifest(_edited(edit), FILE)
    assert caught.value.field == field
    assert expected in caught.value.expected
    assert found in caught.value.found


def test_a_newer_manifest_is_not_called_broken_even_with_fields_unknown_here() -> None:
    data = _edited(lambda d: d.update(format=2, tensors="elsewhere", compressed=True))
    with pytest.raises(NewerVersion, match="Upgrade keepstep") as caught:
        decode_manifest(data, FILE)
    assert caught.value.version == 2


def test_another_way_to_write_the_same_json_is_read() -> None:
    document = json.loads(encode_manifest(_manifest()))
    assert decode_manifest(json.dumps(document, indent=2).encode(), FILE) == _manifest()


def test_other_kinds_of_files_are_called_what_they_seem() -> None:
    for data, kind in (
        (b"PK\x03\x04rest", "zip"),
        (b"\x80\x04\x95\x10", "pickle"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\0" * 100, "zero bytes"),
        (b"<html>", "HTML"),
    ):
        with pytest.raises(Foreign, match=kind):
            decode_manifest(data, FILE)

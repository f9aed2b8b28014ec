"""Bytes that somebody made to hurt: each is refused, with file and field, and nothing else happens.

And a fuzz: thousands of random changes to good files. A reader may take a changed image header that
is still as the format says (the digest in the manifest tells), but raises FormatError or nothing.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from keepstep.ckpt.checksum import chunk_digests, digest128
from keepstep.ckpt.entry import Commit, Record, decode_record, encode_record
from keepstep.ckpt.errors import Foreign, FormatError, NewerVersion
from keepstep.ckpt.image import build, seal
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.manifest import (
    ImageRecord,
    Manifest,
    State,
    TensorSpec,
    decode_manifest,
    encode_manifest,
)
from keepstep.ckpt.placement import Mesh, MeshAxis, Placement, Split
from keepstep.ckpt.plan import plan_digest
from keepstep.ckpt.region import Box, whole

FILE = "states/g000003/s000000000120/r00001.safetensors"
_MESH = Mesh((MeshAxis("tp", 2),))
_STATE = State(3, 120)


def _image() -> bytes:
    """A good sealed header, of 68 bytes of data."""
    items = {
        "model/w": ("F32", (8, 2), Box((4, 0), (4, 2))),
        "model/b": ("F32", (3,), whole((3,))),
        "model/z": ("C128", (2,), Box((0,), (1,))),
        "model/u": ("U8", (8,), whole((8,))),
    }
    header = build("demo", _STATE, 1, _MESH, "c" * 32, items)
    return seal(header, chunk_digests(bytes(header.data_bytes)))


def _framed(text: bytes) -> bytes:
    """A header around `text`, padded as it must be."""
    total = -(-(8 + len(text)) // 4096) * 4096
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def _with(edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(_image()[8:])
    edit(document)
    return _framed(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())


def _metadata(**changes: str) -> bytes:
    return _with(lambda d: d["__metadata__"].update(changes))


def _entry(name: str, **changes: object) -> bytes:
    return _with(lambda d: d[name].update(changes))


def _renamed(name: str) -> bytes:
    def edit(document: dict[str, Any]) -> None:
        entries = list(document.items())
        document.clear()
        document.update((name if key == "model/u" else key, value) for key, value in entries)

    return _with(edit)


def test_the_image_that_the_tests_here_change_is_good() -> None:
    assert _with(lambda _: None) == _image()
    assert parse(_image(), FILE, 4096 + 68).data_bytes == 68


@pytest.mark.parametrize(
    ("image", "field"),
    [
        (_metadata(keepstep="0"), "__metadata__.keepstep"),
        (_metadata(keepstep="one"), "__metadata__.keepstep"),
        (_metadata(job="../x"), "header"),
        (_metadata(state="g3/s120"), "__metadata__.state"),
        (_metadata(state="g-00003/s000000000120"), "__metadata__.state"),
        (_metadata(rank="-1"), "__metadata__.rank"),
        (_metadata(rank="2"), "header"),
        (_metadata(rank="01"), "header byte"),
        (_metadata(mesh="tp=0"), "header"),
        (_metadata(mesh="tp=2,tp=2"), "header"),
        (_metadata(mesh="tp=2=3"), "__metadata__.mesh"),
        (_metadata(mesh="tp=02"), "header byte"),
        (_metadata(mesh="tp=2," * 1000), "__metadata__.mesh"),
        (_metadata(plan="C" * 32), "header"),
        (_metadata(chunks=""), "__metadata__.chunks"),
        (_metadata(chunks="0" * 32), "__metadata__.chunks"),
        (_metadata(chunks="x" * 16), "__metadata__.chunks"),
        (_metadata(tensors="[]"), "__metadata__.tensors"),
        (_metadata(tensors="[[],[],[],[],[]]"), "__metadata__.tensors"),
        (_metadata(tensors="["), "__metadata__.tensors"),
        (_metadata(tensors="[" * 100_000), "__metadata__.tensors"),
        (_metadata(tensors='[[[2],[0],[1],"C128"],[],[[8,2]],[]]'), "__metadata__.tensors of"),
        (_metadata(tensors='[["x","y"],[],[[8,2],[4,0]],[]]'), "__metadata__.tensors of"),
        (_metadata(tensors='[[[2],[0],[1],"F99"],[],[[8,2],[4,0]],[]]'), "header"),
        (_metadata(tensors='[[[2],[0],[1],"F64"],[],[[8,2],[4,0]],[]]'), "header['model/z'].dt"),
        (_metadata(tensors='[[[2],[2],[1],"C128"],[],[[8,2],[4,0]],[]]'), "header"),
        (
            _metadata(tensors='[[[2],[0],[2],"C128"],[],[[8,2],[4,0]],[]]'),
            "header['model/z'].shape",
        ),
        (_metadata(tensors='[[[2],[0],[1],"C128"],[],[[8,2],[5,0]],[]]'), "header"),
        (_metadata(tensors='[[[2],[0],[1],"C128"],[],[[8,2],[-1,0]],[]]'), "__metadata__.tensors"),
        (_metadata(tensors='[[[2],[0],[1],"C128"],[],[[8],[4]],[]]'), "header"),
        (_metadata(tensors='[[[2],[0],[1],"C128"],[[3],[0]],[[8,2],[4,0]],[]]'), "header byte"),
        (_metadata(extra="1"), "header['__metadata__']"),
        (_with(lambda d: d["__metadata__"].pop("rank")), "__metadata__"),
        (_with(lambda d: d.update(__metadata__=5)), "header"),
        (_entry("model/w", data_offsets=[16, 49]), "header['model/w'].data_offsets"),
        (_entry("model/w", data_offsets=[27, 59]), "header['model/w'].data_offsets"),
        (_entry("model/w", data_offsets=[29, 61]), "header['model/w'].data_offsets"),
        (_entry("model/w", data_offsets=[60, 28]), "header['model/w'].data_offsets"),
        (_entry("model/w", data_offsets=[-4, 28]), "header['model/w'].data_offsets[0]"),
        (_entry("model/w", data_offsets=[28, 2**64]), "header['model/w'].data_offsets[1]"),
        (_entry("model/w", data_offsets=[28, 60, 99]), "header['model/w'].data_offsets"),
        (_entry("model/u", data_offsets=[60, 10**12]), "header['model/u'].data_offsets"),
        (_entry("model/w", shape=[4, -2]), "header['model/w'].shape[1]"),
        (_entry("model/w", shape=[4, 2**62]), "header['model/w'].shape[1]"),
        (_entry("model/w", shape=[2**47, 2**47]), "header"),
        (_entry("model/b", shape=[2**47] * 30), "header"),
        (_entry("model/b", shape=[1] * 65), "header"),
        (_entry("model/b", shape=[1] * 10_000_000), "shape"),
        (_entry("model/w", shape=[2, 4]), "header"),
        (_entry("model/w", shape="42"), "header['model/w'].shape"),
        (_entry("model/w", dtype="F33"), "header"),
        (_entry("model/w", dtype="I32", extra=[[[[]]]]), "header['model/w']"),
        (_with(lambda d: d["model/w"].pop("dtype")), "header['model/w']"),
        (_with(lambda d: d.update({"model/w": [[[]]]})), "header['model/w']"),
        (_renamed("model/../../../etc/passwd"), "header"),
        (_renamed("/etc/passwd"), "header"),
        (_renamed("..\\..\\boot.ini"), "header"),
        (_renamed("a\u0000b"), "header"),
        (_renamed(""), "header"),
        (_renamed("n" * 1025), "header"),
        (_with(lambda d: d.update({"model/b": d.pop("model/b")})), "header"),
        (_framed(_image()[8:].rstrip().replace(b',"model/u"', b', "model/u"')), "header byte"),
        (_framed(_image()[8:].rstrip().replace(b"model/u", b"model\\/u")), "header byte"),
        (_framed(_image()[8:].rstrip() + b" " * 4096), "header byte"),
        (_framed(_image()[8:].rstrip().replace(b"[16]", b"[16.0]")), "header['model/z'].shape[0]"),
        (_framed(_image()[8:].rstrip().replace(b"[16]", b"[NaN]")), "header"),
        (_framed(_image()[8:].rstrip().replace(b"[16]", b"[1e1]")), "header"),
        (_framed(b'{"a":' * 200_000), "header"),
        (_framed(b"[" * 200_000), "header"),
        (_framed(b""), "header"),
        (_framed(b"\xff\xfe"), "header"),
        (_image()[:8] + _image()[8:].replace(b" ", b"\n"), "header byte"),
    ],
)
def test_a_header_that_is_not_as_the_format_says_is_refused(image: bytes, field: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(image, FILE)
    assert caught.value.file == FILE
    assert caught.value.field.startswith(field)
    assert len(str(caught.value)) < 1_000


def _doubled(name: str) -> bytes:
    """The entry `name` twice, with everything else as if it were two tensors."""
    text = _image()[8:].rstrip()
    start = text.index(f'"{name}":'.encode())
    end = text.find(b"}", start) + 1
    return _framed(text[:end] + b"," + text[start:end] + text[end:])


@pytest.mark.parametrize("name", ["model/w", "model/u"])
def test_a_tensor_that_is_there_twice_is_refused_by_name(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(_doubled(name), FILE)
    assert caught.value.found == f"{name!r} twice"


def test_metadata_that_is_there_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="header byte"):
        parse(_doubled("__metadata__"), FILE)


def test_a_header_with_data_still_behind_it_is_refused() -> None:
    with pytest.raises(FormatError) as caught:
        parse(_image() + bytes(68), FILE)
    assert caught.value.field == "header length"


def test_every_length_that_the_file_can_be_cut_to_is_refused() -> None:
    file = _image() + bytes(68)
    for length in range(len(file)):
        with pytest.raises(FormatError):
            parse(file[: header_size(file[: min(length, 64)], FILE, length)], FILE, length)
    with pytest.raises(FormatError, match="size: expected 4164 bytes"):
        parse(_image(), FILE, len(file) + 1)


def test_a_header_of_more_than_100_megabytes_is_refused_by_its_first_8_bytes() -> None:
    head = (100_000_001).to_bytes(8, "little")
    with pytest.raises(FormatError, match="header length: expected at most 100000000"):
        header_size(head, FILE, 10**12)
    with pytest.raises(FormatError, match="truncated"):
        header_size((10**6).to_bytes(8, "little"), FILE, 5000)
    with pytest.raises(FormatError, match="header length"):
        header_size(b"\xff" * 8, FILE, 10**12)


def test_a_newer_image_is_not_called_broken() -> None:
    with pytest.raises(NewerVersion, match="Upgrade keepstep") as caught:
        parse(_metadata(keepstep="2"), FILE)
    assert caught.value.version == 2
    newer = _with(lambda d: (d["__metadata__"].update(keepstep="3", new="x"), d.update(x={"y": 1})))
    with pytest.raises(NewerVersion):
        parse(newer, FILE)


def test_a_safetensors_file_of_somebody_else_is_told_from_a_broken_one() -> None:
    theirs = {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [1]}}
    for document in (theirs, {"w": theirs["w"]}, {}):
        with pytest.raises(Foreign, match="keepstep import"):
            parse(_framed(json.dumps(document).encode()), FILE)


def _zip() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        *((bytes([128, p]) + b"}q\0.", f"pickle of protocol {p}") for p in (2, 3, 4, 5)),
        (_zip(), "torch.save"),
        (bytes(9000), "zero bytes"),
        (b"\x89HDF\r\n\x1a\n" + bytes(5000), "HDF5"),
        (b"\x93NUMPY\x01\x00" + bytes(5000), "numpy"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b'<?xml version="1.0"?><Error>', "XML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    ],
)
def test_files_of_other_kinds_are_named_and_never_loaded(data: bytes, kind: str) -> None:
    with pytest.raises(Foreign, match=kind):
        header_size(data[:64], FILE, len(data))
    with pytest.raises(Foreign, match=kind):
        parse(data, FILE)
    with pytest.raises(Foreign, match=kind):
        decode_manifest(data, FILE)
    with pytest.raises(Foreign, match=kind):
        decode_record(data, FILE)


def _manifest() -> bytes:
    placements = (Placement((Split("tp", 0),)), Placement())
    tensors = {"model/w": TensorSpec((7, 3), "F32", 0), "model/b": TensorSpec((3,), "U8", 1)}
    return encode_manifest(
        Manifest(
            format=1,
            job="demo",
            state=_STATE,
            mesh=_MESH,
            placements=placements,
            tensors=tensors,
            aliases={"model/o": "model/w"},
            values={"step": 120, "lr": [0.1, 1e-5], "config": {"é": None}},
            plan_digest=plan_digest(_MESH, placements, tensors),
            images=(
                ImageRecord(0, 4096 + 50, 4096, "a" * 32),
                ImageRecord(1, 4096 + 37, 4096, "b" * 32),
            ),
        )
    )


def test_what_is_wrong_first_is_told_even_if_the_rest_is_no_json() -> None:
    changed = _manifest().replace(b'"shape":[7,3]', b'"shape":["7",3]')
    assert changed != _manifest()
    with pytest.raises(FormatError) as whole_file:
        decode_manifest(changed, FILE)
    assert whole_file.value.field == "tensors['model/w'].shape[0]"
    for end in range(changed.index(b'"7"') + 4, len(changed)):
        with pytest.raises(FormatError, match=FILE):
            decode_manifest(changed[:end], FILE)


def _mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four random changes: flip, insert, delete, repeat, a number, a bracket."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed))
        match rng.randrange(7):
            case 0:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place:place] = rng.randbytes(rng.randint(1, 9))
            case 2:
                del changed[place : place + rng.randint(1, 40)]
            case 3:
                end = place + rng.randint(1, 60)
                changed[place:place] = changed[place:end]
            case 4:
                changed[place : place + 1] = str(rng.choice(_NUMBERS)).encode()
            case 5:
                changed[place : place + 1] = rng.choice(_TOKENS)
            case _:
                other = rng.randrange(len(changed))
                changed[place], changed[other] = changed[other], changed[place]
        changed = changed or bytearray(b"x")
    return bytes(changed)


_NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 1.5, -0.0)
_TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"null", b"true", b"NaN", b"Infinity"),
    *(b"1e999", b'"__metadata__"', b'"\\ud800"', b"\xff", b"\0", b"[[[[[[[[", b'{"a":', b"../"),
)


def _survivors(good: bytes, read: Callable[[bytes], object], seed: int, count: int) -> list[bytes]:
    """Which of `count` changed files the reader took. Any error but FormatError fails the test."""
    rng = random.Random(seed)
    taken, errors = [], []
    for _ in range(count):
        data = _mutated(good, rng)
        try:
            read(data)
        except FormatError as error:
            errors.append(error)
        else:
            taken.append(data)
    assert len(errors) > count // 2
    assert all(error.file == FILE for error in errors)
    assert all(len(str(error)) < 1_000 for error in errors)
    return taken


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_to_a_log_entry_are_all_found(seed: int) -> None:
    good = encode_record(
        Record(7, "ab" * 16, "demo", 4, "2026-11-30T15:04:05Z", Commit(_STATE, "d" * 32, 5))
    )
    taken = _survivors(good, lambda data: decode_record(data, FILE), seed, 2_000)
    assert all(data == good for data in taken)


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_to_json_under_a_right_checksum_raise_format_errors_only(seed: int) -> None:
    good = encode_record(
        Record(7, "ab" * 16, "demo", 4, "2026-11-30T15:04:05Z", Commit(_STATE, "d" * 32, 5))
    )[33:-1]

    def read(data: bytes) -> object:
        return decode_record(digest128(data).encode() + b"\n" + data + b"\n", FILE)

    for data in _survivors(good, read, seed, 2_000):
        json.loads(data)


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_to_a_manifest_raise_format_errors_only(seed: int) -> None:
    good = _manifest()
    for data in _survivors(good, lambda data: decode_manifest(data, FILE), seed, 2_000):
        assert encode_manifest(decode_manifest(data, FILE))


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_to_an_image_header_raise_format_errors_only(seed: int) -> None:
    good = _image()
    text = good[8:].rstrip()

    def read(data: bytes) -> object:
        return parse(data, FILE)

    for data in _survivors(good, read, seed, 1_000):
        assert seal(parse(data, FILE), parse(data, FILE).digests) == data
    for data in _survivors(text, lambda data: parse(_framed(data), FILE), seed, 3_000):
        parsed = parse(_framed(data), FILE)
        assert seal(parsed, parsed.digests) == _framed(data)

"""docs/format.md tells the truth: its examples are the real bytes, its commands work, and a reader
written from it alone reads a checkpoint. That reader imports nothing of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from tests.kit.encoded import make_encoded_store, weights
from tests.kit.make_store import Content, mesh, split
from tests.kit.spec_store import JOB, STATE, TENSORS, write_spec_store

from keepstep.ckpt.document import encode
from keepstep.ckpt.encoding import SPAN_BYTES
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.keys import done_key, image_key
from keepstep.ckpt.manifest import TensorSpec, decode_manifest
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box, Region, intersect, relative_to, runs
from keepstep.ckpt.store_tier import read_done
from keepstep.ckpt.verify import verify
from keepstep.storage.file import FileStore

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "format.md"
STATE_DIRECTORY = "states/g000001/s000000000020"


class Block(NamedTuple):
    info: str
    text: str


def blocks() -> list[Block]:
    """The fenced blocks of the document: what stands after the fence, and the content."""
    found = re.findall(r"^```(.*?)\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(info.strip(), text) for info, text in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec")
    write_spec_store(FileStore(path))
    return path


def test_the_example_verifies(place: Path) -> None:
    report = verify(FileStore(place))
    assert (report.findings, report.unreferenced, report.job) == ((), (), JOB)


def test_the_listing_is_what_lies_in_the_example(place: Path) -> None:
    listing = next(block.text for block in blocks() if block.info == "")
    shown = [line.split()[0] for line in listing.splitlines()]
    there = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
    assert shown == there


def test_shown_files_are_the_real_bytes(place: Path) -> None:
    shown = [block for block in blocks() if "/" in block.info]
    assert len(shown) == 2
    for block in shown:
        kind, key = block.info.split()
        text = (place / key).read_text()
        if kind == "json":
            assert json.loads(block.text) == json.loads(text)
            canonical = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
            assert text == canonical
        else:
            assert block.text == text


def test_the_shown_done_record_is_what_the_manifest_has(place: Path) -> None:
    shown = next(block.text for block in blocks() if block.info == "json done record of rank 2")
    manifest = json.loads((place / "states/g000001/s000000000020/manifest.json").read_text())
    assert json.loads(shown) in manifest["images"]
    store = FileStore(place)
    store.put(done_key(STATE, 2), shown.encode())
    assert (
        encode(read_done(store, STATE, 2))
        == json.dumps(json.loads(shown), sort_keys=True, separators=(",", ":")).encode()
    )
    store.delete(done_key(STATE, 2))


def test_the_shown_header_is_the_real_one(place: Path) -> None:
    shown = next(block.text for block in blocks() if block.info == "text header r00002")
    data = (place / STATE_DIRECTORY / "r00002.safetensors").read_bytes()
    assert data[8:4096].decode().rstrip(" ") + "\n" == shown


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed here")
def test_the_commands_print_what_the_document_says(place: Path) -> None:
    listed = blocks()
    commands = [n for n, block in enumerate(listed) if block.info == "sh"]
    assert len(commands) == 4
    for n in commands:
        assert listed[n + 1].info == "text output"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", listed[n].text],
            cwd=place,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr, done.stdout) == (0, "", listed[n + 1].text)


def test_the_worked_example_of_another_layout_is_right(place: Path) -> None:
    store = FileStore(place)
    data = store.get(f"{STATE_DIRECTORY}/manifest.json", 1 << 20)
    manifest = decode_manifest(data, "manifest")
    plan = Plan(manifest.mesh, manifest.placements, manifest.tensors)
    rows = {rank: plan.owned(rank).get("model/w") for rank in range(6)}
    assert rows == {
        0: Box((0, 0), (2, 4)),
        1: Box((4, 0), (1, 4)),
        2: Box((2, 0), (2, 4)),
        3: Box((5, 0), (1, 4)),
        4: None,
        5: Box((6, 0), (1, 4)),
    }
    assert "model/b" in plan.owned(0)
    needed = Box((0, 0), (7, 2))
    assert len(plan.owners(Region("model/w", needed))) == 5
    held = Box((2, 0), (2, 4))
    common = intersect(needed, held)
    assert common == Box((2, 0), (2, 2))
    assert relative_to(common, held) == Box((0, 0), (2, 2))
    in_image = [(at, length) for at, _, length in runs(common, held, 4)]
    assert in_image == [(0, 8), (16, 8)]
    assert list(runs(common, needed, 4)) == [(16, 0, 16)]  # rows of 8 bytes, without a gap
    text = " ".join(DOCUMENT.read_text().split())
    assert "| row 2 | 0 | 4096 | 16 | 8, 9 |" in text
    assert "| row 3 | 16 | 4112 | 24 | 12, 13 |" in text
    image = store.get(image_key(STATE, 2), 1 << 20)
    assert np.frombuffer(image[4096:4104], "<f4").tolist() == [8, 9]
    assert np.frombuffer(image[4112:4120], "<f4").tolist() == [12, 13]


def test_the_plan_digest_is_computed_as_described(place: Path) -> None:
    manifest = json.loads((place / STATE_DIRECTORY / "manifest.json").read_text())

    def compact(value: object) -> str:
        return json.dumps(value, separators=(",", ":"))

    placements = []
    for placement in manifest["placements"]:
        splits = [{"axis": each["axis"], "dim": each["dim"]} for each in placement["splits"]]
        pins = [{"axis": each["axis"], "coords": each["coords"]} for each in placement["at"]]
        placements.append({"splits": splits, "at": pins})
    used = sorted(map(compact, placements))
    rows = [
        [name, spec["shape"], spec["dtype"], used.index(compact(placements[spec["placement"]]))]
        for name, spec in sorted(manifest["tensors"].items())
    ]
    axes = [{"name": axis["name"], "size": axis["size"]} for axis in manifest["mesh"]["axes"]]
    document = compact([1, {"axes": axes}, [json.loads(text) for text in used], rows])
    assert xxhash.xxh3_128_hexdigest(document.encode()) == manifest["plan_digest"]


def test_a_header_that_is_written_in_another_way_is_refused(place: Path) -> None:
    data = (place / STATE_DIRECTORY / "r00002.safetensors").read_bytes()
    encoded = data[: header_size(data, "image", len(data))]
    assert parse(encoded, "image").rank == 2
    moved = encoded.replace(b'{"__metadata__"', b'{ "__metadata__"').replace(b"  ", b" ", 1)
    assert len(moved) == len(encoded)
    assert json.loads(moved[8:]) == json.loads(encoded[8:])
    with pytest.raises(FormatError):
        parse(moved, "image")


class Stranger:
    """A reader made from the document: json, struct, xxhash and numpy."""

    DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16)}  # noqa: RUF012

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            seq = len(found)
            path = self.root / f"log/{seq // 1000:06}/{seq:09}"
            if not path.exists():
                return found
            data = path.read_bytes()
            text = data[33:-1]
            assert (data[32:33], data[-1:]) == (b"\n", b"\n")
            assert xxhash.xxh3_128_hexdigest(text) == data[:32].decode()
            found.append(json.loads(text))

    def manifest(self, commit: dict[str, Any]) -> dict[str, Any]:
        state = commit["state"]
        self.at = self.root / f"states/g{state['generation']:06}/s{state['step']:012}"
        data = (self.at / "manifest.json").read_bytes()
        assert xxhash.xxh3_128_hexdigest(data) == commit["manifest_digest"]
        manifest: dict[str, Any] = json.loads(data)
        return manifest

    def image(self, manifest: dict[str, Any], record: dict[str, Any]) -> bytes:
        """The plain bytes, if need be from the second encoding (8.1)."""
        path = self.at / f"r{record['rank']:05}.safetensors"
        entries = [one for one in manifest.get("encoded", ()) if one["rank"] == record["rank"]]
        if not entries:
            return path.read_bytes()
        (entry,) = entries
        stored = path.with_name(f"{path.name}.zst").read_bytes()
        unzip = zstandard.ZstdDecompressor().decompress
        place = entry["header_bytes"]
        parts, plain = [stored[:place]], unzip(stored[:place])
        left = record["size_bytes"] - record["header_bytes"]
        for planes, first, rest in entry["spans"]:
            size = min(left, 2**23)
            parts.append(stored[place : place + first + rest])
            others = unzip(parts[-1][first:]) if rest else b""
            rows = [others[n * (size // planes) :][: size // planes] for n in range(planes - 1)]
            rows.append(unzip(parts[-1][:first]))
            groups = zip(*rows, strict=True)
            plain += bytes(byte for group in groups for byte in group)
            plain += others[(planes - 1) * (size // planes) :]
            place, left = place + first + rest, left - size
        assert (place, left) == (len(stored), 0)
        checksums = "".join(xxhash.xxh3_64_hexdigest(part) for part in parts)
        assert xxhash.xxh3_128_hexdigest(checksums.encode()) == entry["digest"]
        return plain

    def tensors(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """All tensors, put together from all images, by what their headers say."""
        whole = {
            name: np.zeros(spec["shape"], self.DTYPES[spec["dtype"]])
            for name, spec in manifest["tensors"].items()
        }
        for image in manifest["images"]:
            data = self.image(manifest, image)
            header = data[: image["header_bytes"]]
            assert xxhash.xxh3_128_hexdigest(header) == image["digest"]
            assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
            fields = json.loads(header[8:])
            metadata = fields.pop("__metadata__")
            body = data[len(header) :]
            for n in range(-(-len(body) // 2**20)):
                chunk = body[n * 2**20 : (n + 1) * 2**20]
                stated = metadata["chunks"][16 * n : 16 * (n + 1)]
                assert xxhash.xxh3_64_hexdigest(chunk) == stated
            parts = json.loads(metadata["tensors"])
            for (name, field), part in zip(fields.items(), parts, strict=True):
                first, end = field["data_offsets"]
                values = np.frombuffer(body[first:end], self.DTYPES[field["dtype"]])
                offsets = part[1] if part else [0] * len(field["shape"])
                index = tuple(slice(o, o + s) for o, s in zip(offsets, field["shape"], strict=True))
                whole[name][index] = values.reshape(field["shape"])
        return whole


def test_a_reader_made_from_the_document_alone_reads_the_checkpoint(place: Path) -> None:
    stranger = Stranger(place)
    entries = stranger.entries()
    assert [entry["body"]["kind"] for entry in entries] == ["term", "generation", "commit"]
    tensors = stranger.tensors(stranger.manifest(entries[-1]["body"]))
    assert tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(tensors[name], expected)


def test_a_reader_made_from_the_document_alone_reads_an_encoded_checkpoint(tmp_path: Path) -> None:
    tensors = {
        "model/w": weights((SPAN_BYTES // 4 + 1_001,)),
        "model/b": TENSORS["model/b"],
        "model/zeros": np.zeros(1_001, np.float32),
    }
    content = Content(dict(tensors), mesh(dp=2, tp=1))
    manifest = make_encoded_store(FileStore(tmp_path), content)
    assert [len(one.spans) for one in manifest.encoded] == [1, 1]
    assert {span.planes for one in manifest.encoded for span in one.spans} == {4}
    stranger = Stranger(tmp_path)
    found = stranger.tensors(stranger.manifest(stranger.entries()[-1]["body"]))
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        np.testing.assert_array_equal(found[name], expected)


def test_the_rule_of_who_owns_what_is_computed_as_described() -> None:
    """A second implementation of section 7.1, from the text, against the real one."""
    specs = {
        "a": TensorSpec(shape=(1000, 37), dtype="F32", placement=0),
        "b": TensorSpec(shape=(3, 90_000), dtype="BF16", placement=0),
        "c": TensorSpec(shape=(), dtype="F64", placement=0),
        "d": TensorSpec(shape=(300_000,), dtype="U8", placement=0),
    }
    plan = Plan(mesh(dp=3, tp=2), (split(),), specs)
    found = {rank: plan.owned(rank) for rank in range(6)}
    sizes = {"a": 148_000, "b": 540_000, "c": 8, "d": 300_000}
    length = sum(sizes.values())
    parts = max(1, min(6, length // 65536))
    assert parts == 6
    cuts = [length * part // parts for part in range(parts + 1)]
    expected: dict[int, dict[str, Box]] = {rank: {} for rank in range(6)}
    start = 0
    for name, size in sizes.items():
        shape = specs[name].shape
        for part in range(parts):
            low, high = cuts[part] - start, cuts[part + 1] - start
            if low <= 0 and size <= high:
                expected[part][name] = Box((0,) * len(shape), shape)
            elif low < size and high > 0 and shape:
                thin = max(65536, length // (64 * parts))
                dims = [d for d, n in enumerate(shape) if size <= thin * n]
                dim = dims[0] if dims else shape.index(max(shape))
                ends = []
                for cut in (max(low, 0), min(high, size)):
                    if min(cut, size - cut) < 65536:
                        ends.append(0 if 2 * cut <= size else shape[dim])
                    else:
                        ends.append((2 * cut * shape[dim] + size) // (2 * size))
                if ends[0] < ends[1]:
                    offsets = tuple(ends[0] if d == dim else 0 for d in range(len(shape)))
                    box = tuple(ends[1] - ends[0] if d == dim else n for d, n in enumerate(shape))
                    expected[part][name] = Box(offsets, box)
        start += size
    assert found == expected

"""A slice of the proof that each flipped byte is found; and each cut, growth, loss of a file."""

from __future__ import annotations

import random

import pytest
from tests.prove.flips import big_store, every_byte, flip, small_store, some_bytes, store_of

from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.verify import verify

SMALL = small_store()
FIRST_MANIFEST = next(key for key in SMALL if key.endswith("manifest.json"))


def test_the_undamaged_stores_are_clean() -> None:
    assert verify(store_of(SMALL), threads=1).findings == ()
    assert verify(store_of(big_store()), threads=1).findings == ()


def test_flipped_bytes_of_every_kind_of_file_are_found_and_named() -> None:
    figures = flip(SMALL, every_byte(SMALL, every=37, start=11), random.Random(2))
    assert figures.missed == []
    assert min(figures.flips[kind] for kind in ("entry", "manifest", "image")) > 20


def test_flipped_bytes_of_images_of_several_chunks_are_found_and_named() -> None:
    files = big_store()
    assert max(map(len, files.values())) > 2 * CHUNK_BYTES
    figures = flip(files, some_bytes(files, 150, random.Random(3)), random.Random(4))
    assert figures.missed == []
    assert figures.flips["image"] > 20


@pytest.mark.parametrize("key", SMALL)
def test_a_file_that_is_cut_has_grown_or_is_gone_is_found(key: str) -> None:
    data = SMALL[key]
    for damaged in (data[:-1], data + b"\0", data[1:], b"", data + data):
        files = SMALL | {key: damaged}
        findings = verify(store_of(files), threads=1).findings
        assert {finding.file for finding in findings} == {key}, len(damaged)
    gone = {other: data for other, data in SMALL.items() if other != key}
    findings = verify(store_of(gone), threads=1).findings
    is_last_entry = key == max(k for k in SMALL if k.startswith("log/"))
    # Nothing refers to the last entry: a log without it is a shorter log.
    assert bool(findings) != is_last_entry


def test_files_that_nothing_refers_to_are_listed() -> None:
    manifest = SMALL[FIRST_MANIFEST]
    files = SMALL | {
        "states/g000001/s000000000015/manifest.json": manifest,
        "states/g000001/s000000000020/r00099.safetensors": b"x",
        "notes.txt": b"somebody's",
    }
    report = verify(store_of(files), threads=1)
    assert report.findings == ()
    assert {left.file for left in report.unreferenced} == set(files) - set(SMALL)

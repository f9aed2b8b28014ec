"""Each single flipped byte in each file that the log refers to is found by `verify`, and named."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.kit.checkpoints import TENSORS, begin, write_images
from tests.kit.proof import print_report

from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.commit import commit
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.keys import ImageKey, parse_key
from keepstep.ckpt.manifest import State, TensorSpec
from keepstep.ckpt.verify import verify
from keepstep.ckpt.verify_image import Finding
from keepstep.storage.memory import MemoryStore

BIG = TENSORS | {
    f"model/w{n}.weight": TensorSpec(shape=(600, 1_000), dtype="F32", placement=1) for n in range(2)
}
"""Images of several chunks each, so that a finding can name too many tensors."""

Files = dict[str, bytes]


@dataclass(slots=True)
class Figures:
    """How many bytes were flipped, in how many files, and which were missed."""

    files: int = 0
    total_bytes: int = 0
    flips: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)


def small_store() -> Files:
    """A store of two checkpoints of two ranks, every file a few KB."""
    store = MemoryStore()
    begin(store, 10, 20)
    return _files(store)


def big_store() -> Files:
    """A store of one checkpoint of two ranks, of several chunks each."""
    store = MemoryStore()
    log = begin(store)
    commit(log, write_images(store, State(generation=1, step=10), BIG))
    return _files(store)


def every_byte(files: Files, every: int = 1, start: int = 0) -> Iterator[tuple[str, int]]:
    """Each `every`-th place of all files, from number `start` on."""
    number = 0
    for key, data in files.items():
        for place in range(len(data)):
            if number % every == start % every:
                yield key, place
            number += 1


def some_bytes(files: Files, count: int, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Places drawn at random: a file first, so that small files are not passed over."""
    keys = list(files)
    for _ in range(count):
        key = rng.choice(keys)
        yield key, rng.randrange(len(files[key]))


def flip(files: Files, places: Iterable[tuple[str, int]], rng: random.Random) -> Figures:
    """Flip one byte at a time, in a way drawn at random, and see whether `verify` says so."""
    figures = Figures(len(files), sum(map(len, files.values())))
    store = store_of(files)
    headers = {key: _header(key, data) for key, data in files.items() if _kind(key) == "image"}
    for key, place in places:
        mask = rng.randrange(1, 256)
        damaged = bytearray(files[key])
        damaged[place] ^= mask
        store.put(key, damaged)
        findings = verify(store, threads=1).findings
        store.put(key, files[key])
        figures.flips[_kind(key)] += 1
        fault = why_missed(findings, key, place, headers.get(key))
        if fault is not None:
            figures.missed.append(f"{key} byte {place} xor {mask:#04x}: {fault}")
    return figures


def why_missed(
    findings: tuple[Finding, ...], key: str, place: int, header: ImageHeader | None
) -> str | None:
    """Why the findings do not name the damage at `place`, or None if they do."""
    if not findings:
        return "not found"
    others = {finding.file for finding in findings} - {key}
    if others:
        return f"also blamed {others}"
    if header is None or place < header.header_bytes:
        return None
    offset = place - header.header_bytes
    owner = header.names_at(offset, 1)
    chunk = header.names_at(offset - offset % CHUNK_BYTES, CHUNK_BYTES)
    named = [name for finding in findings for name in finding.tensors]
    if not set(owner) <= set(named):
        return f"tensor {owner} not named in {named}"
    if set(named) - set(chunk):
        return f"named {named}, only {chunk} are in that chunk"
    return None


def store_of(files: Files) -> MemoryStore:
    """A store that holds exactly these files."""
    store = MemoryStore()
    for key, data in files.items():
        store.put(key, data)
    return store


def _files(store: MemoryStore) -> Files:
    return {info.key: store.get(info.key, info.size_bytes) for info in store.list("")}


def _header(key: str, data: bytes) -> ImageHeader:
    return parse(data[: header_size(data, key, len(data))], key, len(data))


def _kind(key: str) -> str:
    if key.startswith("log/"):
        return "entry"
    return "image" if isinstance(parse_key(key), ImageKey) else "manifest"


def main(arguments: list[str]) -> int:
    """Flip every byte of the small store, and many of the big one; 1 if any was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampled", type=int, default=3_000, help="flips in the big store")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    rng = random.Random(options.seed)
    files = small_store()
    small = flip(files, every_byte(files), rng)
    files = big_store()
    big = flip(files, some_bytes(files, options.sampled, rng), rng)
    missed = small.missed + big.missed
    print_report(
        "flips",
        options.seed,
        {
            "exhaustive": {
                "files": small.files, "bytes": small.total_bytes, "flips": dict(small.flips)
            },
            "sampled": {"files": big.files, "bytes": big.total_bytes, "flips": dict(big.flips)},
            "missed": len(missed),
            "first_missed": missed[:5],
            "seconds": round(time.monotonic() - begun, 1),
        },
    )  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

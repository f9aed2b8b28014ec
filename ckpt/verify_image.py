"""Verifying one image: its size, its header byte by byte, and every chunk of its data.

All of a header but the checksums follows from the manifest's plan. So it is made anew, compared,
and a byte that differs is named by the field or the tensor's entry that it lies in. If the digest
proves that just the checksums survived, the data is checked with them all the same.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from keepstep.ckpt.checksum import (
    CHUNK_BYTES,
    CHUNK_DIGITS,
    chunk_count,
    chunk_digest,
    chunk_digests,
    digest128,
)
from keepstep.ckpt.encoding import EncodedImage
from keepstep.ckpt.image import CHUNKS_AT, ImageHeader, build, items_of
from keepstep.ckpt.keys import stored_key
from keepstep.ckpt.manifest import ImageRecord, Manifest
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.safetensors_file import LENGTH_BYTES
from keepstep.storage.errors import NotFound, Permanent
from keepstep.storage.store import Store

SPAN_BYTES = 8 * CHUNK_BYTES
"""How much a thread reads, and holds, at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        file: key of the file.
        part: what of it: "file", "size", "manifest", "header", a field, "chunk 3", ...
        tensors: the tensors that it belongs to; several if they share a chunk.
        expected: what should be there.
        found: what is.
    """

    file: str
    part: str
    tensors: tuple[str, ...]
    expected: str
    found: str

    def __str__(self) -> str:
        names = f" ({', '.join(self.tensors)})" if self.tensors else ""
        return f"{self.file}: {self.part}{names}: expected {self.expected}, found {self.found}"


def planned_header(manifest: Manifest, plan: Plan, rank: int) -> ImageHeader:
    """The header that the image of `rank` must have, with zeros for the checksums."""
    items = items_of(manifest.tensors, plan.owned(rank))
    job, state, mesh = manifest.job, manifest.state, manifest.mesh
    return build(job, state, rank, mesh, manifest.plan_digest, items)


def check_image(
    store: Store,
    manifest: Manifest,
    plan: Plan,
    record: ImageRecord,
    on_read: Callable[[int], None],
    threads: int,
) -> Iterator[Finding]:
    """What is wrong with the image of `record.rank`. Calls `on_read` with the bytes just read.

    `store`: the `plain_view` of the store.
    """
    file = stored_key(manifest, record.rank)
    planned = planned_header(manifest, plan, record.rank)
    if (planned.header_bytes, planned.size_bytes) != (record.header_bytes, record.size_bytes):
        expected = f"a header of {planned.header_bytes} bytes in a file of {planned.size_bytes}"
        found = f"{record.header_bytes} and {record.size_bytes} in the manifest"
        yield Finding(file, "plan", (), expected, found)
        return
    try:
        size_bytes = store.stat(file).size_bytes
    except NotFound:
        found = "no such file"
        yield Finding(file, "file", tuple(planned.items), f"{record.size_bytes} bytes", found)
        return
    except Permanent as error:
        found = f"what cannot be read: {error}"
        yield Finding(file, "file", tuple(planned.items), f"{record.size_bytes} bytes", found)
        return
    if size_bytes != record.size_bytes:
        yield _size_finding(file, planned, size_bytes)
    if size_bytes < record.header_bytes:
        return
    header = store.get_range(file, 0, record.header_bytes)
    on_read(len(header))
    digests = _digests_in(header, planned)
    if digest128(header) != record.digest or _with_digests(planned, digests) != header:
        yield _header_finding(file, planned, record, header)
        if digest128(_with_digests(planned, digests)) != record.digest:
            return
    yield from _check_data(store, file, planned, digests, size_bytes, on_read, threads)


def check_frames(store: Store, file: str, encoded: EncodedImage) -> Iterator[Finding]:
    """Whether an encoded image has the bytes that were stored, and no others that decode alike.

    What `check_image` finds says which tensors are hurt; this finds what hurts none. `store`: the
    one that has them. Nothing if they are not all there: that is found already.
    """
    digests, start = [], 0
    sizes = (encoded.header_bytes, *(span.stored_bytes for span in encoded.spans))
    try:
        for size_bytes in sizes:
            digests.append(chunk_digest(store.get_range(file, start, size_bytes)))
            start += size_bytes
    except Permanent:
        return
    found = digest128("".join(digests).encode())
    if found != encoded.digest:
        yield Finding(file, "frames", (), f"digest {encoded.digest}", found)


def _size_finding(file: str, planned: ImageHeader, size_bytes: int) -> Finding:
    """A wrong size, with the tensors that the missing end has, if it is too short."""
    lost_at = max(size_bytes - planned.header_bytes, 0)
    lost = planned.names_at(lost_at, planned.data_bytes - lost_at)
    return Finding(file, "size", tuple(lost), f"{planned.size_bytes} bytes", f"{size_bytes}")


def _digests_in(header: bytes, planned: ImageHeader) -> bytes:
    """The bytes at the place of the checksums."""
    return header[CHUNKS_AT : CHUNKS_AT + CHUNK_DIGITS * chunk_count(planned.data_bytes)]


def _with_digests(planned: ImageHeader, digests: bytes) -> bytes:
    end = CHUNKS_AT + len(digests)
    return planned.encoded[:CHUNKS_AT] + digests + planned.encoded[end:]


def _header_finding(file: str, planned: ImageHeader, record: ImageRecord, header: bytes) -> Finding:
    """Where the header first differs from the planned one; else it is a checksum that differs."""
    candidate = _with_digests(planned, _digests_in(header, planned))
    pairs = enumerate(zip(header, candidate, strict=True))
    at = next((place for place, (found, expected) in pairs if found != expected), None)
    if at is None:
        found = f"digest {digest128(header)}"
        return Finding(file, "header: chunks", (), f"digest {record.digest}", found)
    field, tensors = _field_at(planned, at)
    near = slice(max(at - 4, 0), at + 12)
    expected = f"{candidate[near]!r} around byte {at}, by the manifest's plan"
    return Finding(file, f"header: {field}", tensors, expected, repr(header[near]))


def _field_at(planned: ImageHeader, at: int) -> tuple[str, tuple[str, ...]]:
    """Which field of the header byte `at` lies in, and the tensor if it is a tensor's entry."""
    text = planned.encoded.rstrip(b" ")
    if at < LENGTH_BYTES:
        return "length", ()
    if at >= len(text):
        return "padding", ()
    starts, names = [], []
    place = text.index(b"}", LENGTH_BYTES)
    for name in planned.items:
        place = text.index(msgspec.json.encode(name) + b":{", place)
        starts.append(place)
        names.append(name)
    index = bisect_right(starts, at) - 1
    if index >= 0:
        return "entry", (names[index],)
    keys = [b'"%s":"' % key for key in _METADATA_KEYS]
    places = [text.index(key, LENGTH_BYTES) for key in keys]
    index = bisect_right(places, at) - 1
    return "__metadata__" if index < 0 else _METADATA_KEYS[index].decode(), ()


_METADATA_KEYS = (b"chunks", b"job", b"keepstep", b"mesh", b"plan", b"rank", b"state", b"tensors")


def _check_data(
    store: Store,
    file: str,
    planned: ImageHeader,
    digests: bytes,
    size_bytes: int,
    on_read: Callable[[int], None],
    threads: int,
) -> Iterator[Finding]:
    """Compare every chunk with its checksum, as far as the file goes."""
    there_bytes = min(size_bytes - planned.header_bytes, planned.data_bytes)
    if there_bytes < planned.data_bytes:
        there_bytes -= there_bytes % CHUNK_BYTES  # the cut chunk is in the finding on the size
    buffers = threading.local()

    def read(offset: int) -> tuple[int, int, list[str]]:
        length = min(SPAN_BYTES, there_bytes - offset)
        if not hasattr(buffers, "span"):
            buffers.span = bytearray(SPAN_BYTES)
        span = memoryview(buffers.span)[:length]
        store.read_into(file, planned.header_bytes + offset, span)
        return offset, length, chunk_digests(span)

    offsets = range(0, there_bytes, SPAN_BYTES)
    with ExitStack() as stack:
        spans: Iterable[tuple[int, int, list[str]]]
        if len(offsets) < 2:
            spans = map(read, offsets)
        else:
            pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="keepstep-verify")
            spans = stack.enter_context(pool).map(read, offsets)
        for offset, length, found in spans:
            on_read(length)
            for index, digest in enumerate(found, offset // CHUNK_BYTES):
                stated = digests[index * CHUNK_DIGITS : (index + 1) * CHUNK_DIGITS]
                if digest.encode() != stated:
                    yield _chunk_finding(file, planned, index, stated, digest)


def _chunk_finding(
    file: str, planned: ImageHeader, index: int, stated: bytes, digest: str
) -> Finding:
    start = index * CHUNK_BYTES
    size = min(CHUNK_BYTES, planned.data_bytes - start)
    first = planned.header_bytes + start
    part = f"chunk {index}, bytes {first} to {first + size - 1}"
    expected = f"checksum {stated.decode('ascii', 'replace')}"
    return Finding(file, part, tuple(planned.names_at(start, size)), expected, digest)

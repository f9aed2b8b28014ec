"""Reading parts of images into memory, checked against the checksums that the manifest vouches for.

The manifest has the digest of each image's header, the header the checksums of its data. Nothing is
handed on that was not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_digest, digest128
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.ckpt.manifest import ImageRecord, Manifest
from keepstep.ckpt.restore import Read, ReadPlan
from keepstep.storage.store import Store

_BLOCK_BYTES = 8 * CHUNK_BYTES


def fetch_headers(store: Store, manifest: Manifest, ranks: Iterable[int]) -> dict[int, ImageHeader]:
    """The headers of the images of `ranks`, checked against the manifest.

    Raises:
        Corrupt: if a header is not the one that the manifest vouches for.
        FormatError: if the manifest has no such image, if one has another size, or if a header is
            malformed or of another job, state, rank, mesh or plan.
        StoreError: as the store raises it.
    """
    records = {record.rank: record for record in manifest.images}
    return {rank: fetch_header(store, manifest, records, rank) for rank in ranks}


def fetch_header(
    store: Store, manifest: Manifest, records: Mapping[int, ImageRecord], rank: int
) -> ImageHeader:
    """The header of one image. `records` are the manifest's, by rank. Raises as `fetch_headers`."""
    key = image_key(manifest.state, rank)
    record = records.get(rank)
    if record is None:
        raise FormatError(
            manifest_key(manifest.state), "images", f"an image of rank {rank}", "none"
        )
    size_bytes = store.stat(key).size_bytes
    if size_bytes != record.size_bytes:
        raise FormatError(key, "size", f"{record.size_bytes} bytes", f"{size_bytes}")
    data = store.get_range(key, 0, record.header_bytes)
    digest = digest128(data)
    if digest != record.digest:
        raise Corrupt(key, "header", f"digest {record.digest}", digest, offset=0)
    header = parse(data, key, record.size_bytes)
    _check_belongs(header, manifest, rank, key)
    return header


def fetch(
    store: Store,
    manifest: Manifest,
    headers: Mapping[int, ImageHeader],
    plan: ReadPlan,
    target: memoryview,
    threads: int = 2,
) -> None:
    """Carry out the reads of `plan` into `target`, and check every chunk. Blocking.

    Raises:
        Corrupt: naming file, tensors, offset, expected and found checksum of the first bad chunk.
            `target` then has bytes that must not be used.
        StoreError: as the store raises it.
    """
    files = {rank: image_key(manifest.state, rank) for rank in headers}

    def bring(block: Read) -> None:
        header = headers[block.rank]
        view = target[block.stage_offset : block.stage_offset + block.size_bytes]
        store.read_into(files[block.rank], header.header_bytes + block.start, view)
        _check(view, block.start, header, files[block.rank])

    blocks = list(_blocks(plan))
    if len(blocks) <= 1 or threads <= 1:
        for block in blocks:
            bring(block)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-fetch") as pool:
        for _ in pool.map(bring, blocks):  # an error cancels those not begun
            pass


def _check_belongs(header: ImageHeader, manifest: Manifest, rank: int, key: str) -> None:
    for field, expected, found in (
        ("job", manifest.job, header.job),
        ("state", manifest.state, header.state),
        ("rank", rank, header.rank),
        ("mesh", manifest.mesh, header.mesh),
        ("plan", manifest.plan_digest, header.plan_digest),
    ):
        if expected != found:
            raise FormatError(key, field, f"{expected}, as in the manifest", str(found))


def _blocks(plan: ReadPlan) -> Iterator[Read]:
    """The reads, cut so that threads share them evenly and check what is still in the cache."""
    for read in plan.reads:
        for start in range(0, read.size_bytes, _BLOCK_BYTES):
            size_bytes = min(_BLOCK_BYTES, read.size_bytes - start)
            yield Read(read.rank, read.start + start, size_bytes, read.stage_offset + start)


def _check(view: memoryview, start: int, header: ImageHeader, file: str) -> None:
    for offset in range(0, len(view), CHUNK_BYTES):
        chunk = view[offset : offset + CHUNK_BYTES]
        place = start + offset
        found = chunk_digest(chunk)
        expected = header.digests[place // CHUNK_BYTES]
        if found != expected:
            names = header.names_at(place, len(chunk))
            raise Corrupt(
                file,
                f"data chunk {place // CHUNK_BYTES} ({', '.join(map(repr, names[:5]))}"
                f"{', ...' if len(names) > 5 else ''})",
                f"checksum {expected}",
                found,
                tensor=names[0] if names else None,
                offset=header.header_bytes + place,
            )

"""Checksums: xxh3, over chunks of data and over whole documents.

They find what breaks by accident. They are no defence against somebody who changes bytes on purpose
and can change the checksum too.
"""

from __future__ import annotations

import xxhash

from keepstep.storage.store import Buffer

CHUNK_BYTES = 1 << 20
"""Data of an image is checked in chunks of this many bytes, counted from the start of its data."""

CHUNK_DIGITS = 16
"""Hex digits of a chunk's checksum."""

DIGEST_DIGITS = 32
"""Hex digits of a digest of a whole document."""


def chunk_count(size_bytes: int) -> int:
    """Number of chunks of that much data; the last may be shorter."""
    return -(-size_bytes // CHUNK_BYTES)


def chunk_digest(chunk: Buffer) -> str:
    """xxh3_64 of one chunk, 16 lower-case hex digits."""
    return xxhash.xxh3_64_hexdigest(chunk)


def chunk_digests(data: Buffer) -> list[str]:
    """Checksums of all chunks of `data`, which begins at a chunk's border."""
    view = memoryview(data).cast("B")
    return [
        xxhash.xxh3_64_hexdigest(view[start : start + CHUNK_BYTES])
        for start in range(0, len(view), CHUNK_BYTES)
    ]


def digest128(data: Buffer) -> str:
    """xxh3_128 of a whole document, 32 lower-case hex digits."""
    return xxhash.xxh3_128_hexdigest(data)

"""Checksums: the published xxh3 values, chunk by chunk."""

from __future__ import annotations

from keepstep.ckpt.checksum import (
    CHUNK_BYTES,
    chunk_count,
    chunk_digest,
    chunk_digests,
    digest128,
)


def test_digests_are_xxh3_with_seed_0_in_its_canonical_byte_order() -> None:
    # The test vectors of the xxHash project for empty input.
    assert chunk_digest(b"") == "2d06800538d394c2"
    assert digest128(b"") == "99aa06d3014798d86001c324468d497f"


def test_data_is_cut_into_chunks_of_a_mebibyte_and_a_rest() -> None:
    data = bytes(range(256)) * (CHUNK_BYTES // 128) + b"tail"
    digests = chunk_digests(data)
    assert len(digests) == chunk_count(len(data)) == 3
    assert digests == [
        chunk_digest(data[:CHUNK_BYTES]),
        chunk_digest(data[CHUNK_BYTES : 2 * CHUNK_BYTES]),
        chunk_digest(b"tail"),
    ]
    assert chunk_digests(memoryview(bytearray(data))) == digests


def test_no_data_has_no_chunk_and_a_full_chunk_no_rest() -> None:
    assert (chunk_count(0), chunk_digests(b"")) == (0, [])
    assert (chunk_count(CHUNK_BYTES), len(chunk_digests(bytes(CHUNK_BYTES)))) == (1, 1)

"""Frames: what goes in comes out, any zstd tool reads them, and hostile ones cost no memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.encoded import weights

from keepstep.ckpt.encoding import BLOCK_BYTES, PLANES, Span, frame_bytes_max
from keepstep.ckpt.zstd_frames import (
    NotDecodable,
    compressor,
    content,
    decode_span,
    encode_span,
    frame,
    last_plane,
)


def decoded(stored: bytes, span: Span, size_bytes: int) -> bytes:
    target = bytearray(size_bytes)
    decode_span(memoryview(stored), span, memoryview(target))
    return bytes(target)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(min_size=8, max_size=300), st.sampled_from([0, *PLANES]))
def test_a_span_comes_back_whatever_its_planes(data: bytes, planes: int) -> None:
    span, stored = encode_span(memoryview(data), planes, compressor())
    assert span.planes == max(planes, 1)
    assert len(stored) == span.stored_bytes
    assert decoded(stored, span, len(data)) == data


@pytest.mark.parametrize("size_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 300_001])
def test_a_stored_frame_is_read_by_zstd_itself_and_is_as_long_as_said(size_bytes: int) -> None:
    data = np.random.default_rng(0).bytes(size_bytes)
    stored = frame(data, None)
    assert len(stored) == frame_bytes_max(size_bytes)
    assert zstandard.ZstdDecompressor().decompress(stored) == data
    assert frame(data, compressor()) == stored  # noise is never made longer


def test_the_planes_of_a_span_are_in_the_order_that_the_format_says() -> None:
    data = bytes(range(11))
    span, stored = encode_span(memoryview(data), 4, compressor())
    reader = zstandard.ZstdDecompressor()
    assert reader.decompress(stored[: span.first_bytes]) == bytes([3, 7])
    rest = reader.decompress(stored[span.first_bytes :])
    assert rest == bytes([0, 4, 1, 5, 2, 6, 8, 9, 10])
    assert last_plane(data, 4).tobytes() == bytes([3, 7])


def test_weights_become_smaller_by_their_exponents() -> None:
    data = weights((1 << 18,)).tobytes()
    span, stored = encode_span(memoryview(data), 4, compressor())
    assert span.first_bytes < len(data) / 4 * 0.5
    assert len(stored) < 0.88 * len(data)


def hostile(data: bytes, size_bytes: int) -> None:
    """Refused, and never with the memory that it would like."""
    tracemalloc.start()
    try:
        with pytest.raises(NotDecodable):
            content(data, size_bytes)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_of_more_than_was_stated_is_refused_unread() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    hostile(bomb, 1 << 20)


def test_a_frame_that_lies_about_its_content_is_refused() -> None:
    bomb = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 24)))
    assert zstandard.get_frame_parameters(bytes(bomb)).content_size == 1 << 24
    at = bytes(bomb).index((1 << 24).to_bytes(4, "little"))
    bomb[at : at + 4] = (1 << 20).to_bytes(4, "little")
    hostile(bytes(bomb), 1 << 20)
    short = bytearray(frame(bytes(100), compressor()))
    assert zstandard.get_frame_parameters(bytes(short)).content_size == 100
    short[5] = 200
    hostile(bytes(short), 200)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        b"not a frame at all",
        frame(b"abc", None)[:-1],
        frame(b"abc", None) + b"\0",
        frame(b"abc", None) + frame(b"", None),
        b"\x50\x2a\x4d\x18\x03\0\0\0abc",  # a skippable frame
    ],
)
def test_what_is_not_just_one_frame_is_refused(data: bytes) -> None:
    hostile(data, 3)


def test_a_frame_without_its_length_is_refused() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"abc")
    hostile(unsized, 3)


def test_every_flipped_bit_of_a_span_is_refused_or_decodes_within_its_bounds() -> None:
    data = (np.arange(64, dtype=np.float32) / 7).tobytes()
    span, stored = encode_span(memoryview(data), 4, compressor())
    for place in range(len(stored) * 8):
        flipped = bytearray(stored)
        flipped[place // 8] ^= 1 << place % 8
        guarded = bytearray(len(data) + 32)
        try:
            decode_span(memoryview(bytes(flipped)), span, memoryview(guarded)[16:-16])
        except NotDecodable:
            assert bytes(guarded) == bytes(len(guarded))
        assert guarded[:16] == guarded[-16:] == bytes(16)

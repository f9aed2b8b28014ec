"""zstd frames of the second encoding, made and read. Knows nothing of images.

Of trained weights only the byte with the exponent can be made smaller, so that plane is compressed
(to about a third), and the others are put into frames of blocks that are stored as they are: any
zstd tool reads them, and they cost no more than a copy.

numpy is imported here: a keeper imports this file only if it is told to compress.
"""

from __future__ import annotations

import numpy as np
import zstandard

from keepstep.ckpt.encoding import BLOCK_BYTES, Span
from keepstep.storage.store import Buffer

_MAGIC_AND_FLAGS = b"\x28\xb5\x2f\xfd\xa0"
"""A single segment, whose size follows in four bytes; no checksum."""

_LAST_BLOCK = 1


class NotDecodable(ValueError):
    """Stored bytes are not one frame of the content that they should be."""


def compressor() -> zstandard.ZstdCompressor:
    """A compressor for planes of exponents: little but entropy coding. Not thread-safe.

    Against level 1 its output is smaller, and made 2.5 times faster.
    """
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=1,
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        window_log=17,
        search_log=1,
        target_length=0,
        write_content_size=1,
        write_checksum=0,
        write_dict_id=0,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def frame(data: Buffer, made_by: zstandard.ZstdCompressor | None) -> bytes:
    """`data` (1 byte to 4 GB) as one frame: compressed, or stored if that is not longer, or None.

    Equal data make equal frames, with one version of zstd.
    """
    view = memoryview(data)
    if made_by is not None:
        compressed = made_by.compress(view)
        if len(compressed) < view.nbytes:
            return compressed
    parts: list[Buffer] = [_MAGIC_AND_FLAGS, view.nbytes.to_bytes(4, "little")]
    for start in range(0, view.nbytes, BLOCK_BYTES):
        block = view[start : start + BLOCK_BYTES]
        is_last = _LAST_BLOCK if start + block.nbytes == view.nbytes else 0
        parts += [(block.nbytes << 3 | is_last).to_bytes(3, "little"), block]
    return b"".join(parts)


def content(stored: Buffer, size_bytes: int) -> bytes:
    """What one frame, and nothing after it, holds: `size_bytes` bytes. Holds no more than these.

    Raises NotDecodable.
    """
    try:
        found = zstandard.get_frame_parameters(stored).content_size
        if found != size_bytes:
            raise NotDecodable(f"a frame of {found} bytes, expected one of {size_bytes}")
        plain = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=size_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise NotDecodable(str(error)) from error
    if len(plain) != size_bytes:
        raise NotDecodable(f"a frame of {len(plain)} bytes, expected one of {size_bytes}")
    return plain


def last_plane(data: Buffer, planes: int) -> memoryview:
    """The last byte of each `planes` bytes; what is left at the end is in no plane."""
    pieces = np.frombuffer(data, np.uint8)[: len(data) // planes * planes].reshape(-1, planes)
    return np.ascontiguousarray(pieces[:, planes - 1]).data


def encode_span(
    data: memoryview, planes: int, made_by: zstandard.ZstdCompressor
) -> tuple[Span, bytes]:
    """A span, split into `planes` and compressed where that pays; 0: stored as it is."""
    if planes <= 1:
        stored = frame(data, made_by if planes else None)
        return Span(1, len(stored), 0), stored
    first = frame(last_plane(data, planes), made_by)
    count = data.nbytes // planes
    rest = np.empty(data.nbytes - count, np.uint8)
    pieces = np.frombuffer(data, np.uint8)
    others = pieces[: count * planes].reshape(count, planes)[:, : planes - 1]
    np.copyto(rest[: count * (planes - 1)].reshape(planes - 1, count), others.T)
    rest[count * (planes - 1) :] = pieces[count * planes :]
    second = frame(rest.data, None)
    return Span(planes, len(first), len(second)), first + second


def decode_span(stored: memoryview, span: Span, target: memoryview) -> None:
    """Fill `target` with a whole span. Holds its length once more. Raises NotDecodable."""
    size_bytes = target.nbytes
    count = size_bytes // span.planes
    first = content(stored[: span.first_bytes], count)
    if span.planes == 1:
        target[:] = first
        return
    rest = np.frombuffer(content(stored[span.first_bytes :], size_bytes - count), np.uint8)
    others = span.planes - 1
    out = np.frombuffer(target, np.uint8)
    pieces = out[: count * span.planes].reshape(count, span.planes)
    np.copyto(pieces[:, :others].T, rest[: count * others].reshape(others, count))
    pieces[:, others] = np.frombuffer(first, np.uint8)
    out[count * span.planes :] = rest[count * others :]

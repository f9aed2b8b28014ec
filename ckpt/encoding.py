"""The second encoding of an image: which frames it is made of, as the manifest says it (D4).

    header      one zstd frame
    span 0      the first 8 MiB of data: one zstd frame, or two
    span 1      ...

So any range of the image can be read without the rest. Checksums stay those of the plain chunks.
What is said here of lengths bounds what a reader holds, whatever the stored bytes are.
"""

from __future__ import annotations

import re

import msgspec

from keepstep.ckpt.checksum import CHUNK_BYTES, DIGEST_DIGITS
from keepstep.ckpt.errors import FormatError

SPAN_CHUNKS = 8
SPAN_BYTES = SPAN_CHUNKS * CHUNK_BYTES
"""The data that is encoded together; the last span may be shorter. A part of the format."""

PLANES = (1, 2, 4, 8)
SPANS_MAX = 100_000
"""The most spans of an image that is encoded: 800 GB. Keeps done records and manifests small."""

BLOCK_BYTES = 1 << 17
_FRAME_HEAD_BYTES = 9
_BLOCK_HEAD_BYTES = 3

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one span lies there. In JSON an array of three numbers.

    Attributes:
        planes: n: the span is split into n planes, by the position of a byte modulo n.
        first_bytes: length of the frame of the last plane (with n = 1, of all bytes).
        rest_bytes: length of the frame of the others, in order, and of what is left at the end; 0
            with n = 1.
    """

    planes: int
    first_bytes: int
    rest_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Length of both frames."""
        return self.first_bytes + self.rest_bytes


class EncodedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the image of `rank` lies in the store, if it is encoded.

    Attributes:
        header_bytes: length of the header's frame.
        spans: of the data, in order.
        digest: of the checksums of all stored parts, header and spans, as hex digits end to end.
    """

    rank: int
    header_bytes: int
    spans: tuple[Span, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        """Length of the whole stored object."""
        return self.header_bytes + sum(span.stored_bytes for span in self.spans)


def span_count(data_bytes: int) -> int:
    """Number of spans of that much data."""
    return -(-data_bytes // SPAN_BYTES)


def frame_bytes_max(size_bytes: int) -> int:
    """Length of a frame of blocks that are stored as they are; no frame is longer."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return _FRAME_HEAD_BYTES + blocks * _BLOCK_HEAD_BYTES + size_bytes


def check_encoded(
    encoded: EncodedImage, header_bytes: int, data_bytes: int, file: str, field: str
) -> None:
    """Raise FormatError unless the frames can be those of an image with so much header and data."""
    most = frame_bytes_max(header_bytes)
    if not 1 <= encoded.header_bytes <= most:
        raise FormatError(file, f"{field}.header_bytes", f"1 to {most}", f"{encoded.header_bytes}")
    count = span_count(data_bytes)
    if len(encoded.spans) != count or count > SPANS_MAX:
        expected = f"{count} of them, for {data_bytes} bytes of data, and at most {SPANS_MAX}"
        raise FormatError(file, f"{field}.spans", expected, f"{len(encoded.spans)}")
    for number, span in enumerate(encoded.spans):
        size_bytes = min(SPAN_BYTES, data_bytes - number * SPAN_BYTES)
        _check_span(span, size_bytes, file, f"{field}.spans[{number}]")
    if _DIGEST.fullmatch(encoded.digest) is None:
        expected = f"{DIGEST_DIGITS} lower-case hex digits"
        raise FormatError(file, f"{field}.digest", expected, repr(encoded.digest[:120]))


def _check_span(span: Span, size_bytes: int, file: str, field: str) -> None:
    if span.planes not in PLANES or span.planes > size_bytes:
        expected = f"one of {PLANES}, and not more than the {size_bytes} bytes of the span"
        raise FormatError(file, f"{field}[0]", expected, f"{span.planes}")
    first = size_bytes // span.planes
    rest = size_bytes - first
    for place, found, plain in ((1, span.first_bytes, first), (2, span.rest_bytes, rest)):
        least, most = (1, frame_bytes_max(plain)) if plain else (0, 0)
        if not least <= found <= most:
            expected = f"{least} to {most}, for a frame of {plain} bytes"
            raise FormatError(file, f"{field}[{place}]", expected, f"{found}")

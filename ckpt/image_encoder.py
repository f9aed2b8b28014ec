"""An image on its way to the store in its second encoding.

A store must be told the size of an object before the first byte, and an encoded image's is known
after the last. So it is encoded twice: once to measure, once to send. That costs processor time,
which whoever chose to compress has; holding or spooling it would cost as much memory or disk as the
image, which a host may not have, and would leave files behind when the keeper is killed.

How a tensor is encoded is chosen by a sample of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.ckpt.checksum import chunk_digest, digest128
from keepstep.ckpt.dtypes import Dtype
from keepstep.ckpt.encoding import SPAN_BYTES, SPANS_MAX, EncodedImage, Span, span_count
from keepstep.ckpt.errors import Corrupt
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.zstd_frames import compressor, encode_span, frame, last_plane
from keepstep.storage.store import Buffer

_SAMPLES = 8
_SAMPLE_BYTES = 32 << 10
_ALIGNMENT_BYTES = 16

_LEAST_SAVING = 1 / 16
"""What saves less is not worth the time that reading it takes."""

_PARTS = {"C32": 2, "C64": 4, "C128": 8}
"""Numbers in a complex one have this many bytes each."""


class ImageEncoder:
    """One image. Iterating gives its encoded bytes, after `measure`; can be done several times.

    Args:
        stream: the plain bytes; can be read several times, and raises Corrupt before its last piece
            if they are wrong. So do `measure` and iterating then.
        header: of the image.
        file: key that it will have, for errors.
    """

    def __init__(self, stream: Iterable[Buffer], header: ImageHeader, file: str) -> None:
        self._stream = stream
        self._header = header
        self._file = file
        self._spans: list[Span] = []
        self._modes: list[int] = []
        self._digests: list[str] = []
        self._compressor = compressor()
        self._planes: dict[str, int] = {}

    def measure(self) -> EncodedImage | None:
        """Encode it once, for its lengths. None: it is not worth it. Blocking."""
        if span_count(self._header.data_bytes) > SPANS_MAX:
            return None
        parts = _parts(self._stream, self._header.header_bytes)
        head = frame(next(parts), self._compressor)
        self._spans, self._modes, self._digests = [], [], [chunk_digest(head)]
        for number, data in enumerate(parts):
            mode = self._mode(number, data)
            span, stored = encode_span(data, mode, self._compressor)
            self._modes.append(mode)
            self._spans.append(span)
            self._digests.append(chunk_digest(stored))
        found = EncodedImage(
            rank=self._header.rank,
            header_bytes=len(head),
            spans=tuple(self._spans),
            digest=digest128("".join(self._digests).encode()),
        )
        is_worth_it = found.size_bytes <= self._header.size_bytes * (1 - _LEAST_SAVING)
        return found if is_worth_it else None

    def __iter__(self) -> Iterator[bytes]:
        parts = _parts(self._stream, self._header.header_bytes)
        made_by = compressor()  # of its own: a store may read two streams at once
        yield self._same(0, frame(next(parts), made_by))
        for number, (mode, data) in enumerate(zip(self._modes, parts, strict=True)):
            yield self._same(number + 1, encode_span(data, mode, made_by)[1])

    def _same(self, part: int, stored: bytes) -> bytes:
        found = chunk_digest(stored)
        if found != self._digests[part]:
            what = "header" if part == 0 else f"span {part - 1}"
            expected = f"checksum {self._digests[part]}, as it was a moment ago"
            raise Corrupt(self._file, what, expected, found)
        return stored

    def _mode(self, number: int, data: memoryview) -> int:
        """How a span is encoded: as the tensor that has most of it."""
        start, end = number * SPAN_BYTES, number * SPAN_BYTES + data.nbytes
        most, shares = "", (0, 0)
        for name in self._header.names_at(start, data.nbytes):
            item = self._header.items[name]
            share = max(item.offset, start), min(item.offset + item.size_bytes, end)
            if share[1] - share[0] > shares[1] - shares[0]:
                most, shares = name, share
        if most not in self._planes:
            part = data[shares[0] - start : shares[1] - start]
            self._planes[most] = self._chosen(self._header.items[most].dtype, part)
        return self._planes[most]

    def _chosen(self, dtype: Dtype, part: memoryview) -> int:
        """Planes for a tensor, by a sample of its first bytes; 0: stored as it is."""
        step = max(part.nbytes // _SAMPLES // _ALIGNMENT_BYTES, 1) * _ALIGNMENT_BYTES
        length = min(step, _SAMPLE_BYTES)
        sample = b"".join(part[start : start + length] for start in range(0, part.nbytes, step))
        best, saved = 0, len(sample) * _LEAST_SAVING
        for planes in sorted({1, _PARTS.get(dtype.name, dtype.itemsize)}):
            plane = last_plane(sample, planes)
            saving = plane.nbytes - len(self._compressor.compress(plane))
            if saving >= saved:
                best, saved = planes, saving
        return best


def _parts(stream: Iterable[Buffer], header_bytes: int) -> Iterator[memoryview]:
    """The header, then the spans, whatever the pieces of the stream; each until the next."""
    size_bytes, held = header_bytes, bytearray()
    for piece in stream:
        view = memoryview(piece).cast("B")
        while view.nbytes:
            if not held and view.nbytes >= size_bytes:
                part, view = view[:size_bytes], view[size_bytes:]
                size_bytes = SPAN_BYTES
                yield part
                continue
            taken = view[: size_bytes - len(held)]
            view = view[taken.nbytes :]
            held += taken
            if len(held) == size_bytes:
                yield memoryview(held)
                size_bytes, held = SPAN_BYTES, bytearray()
    if held:
        yield memoryview(held)

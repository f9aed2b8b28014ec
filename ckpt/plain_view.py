"""The images of a checkpoint as plain ones, however they lie in the store.

Everything that reads images reads them through this, by ranges, and compares what comes with the
checksums of the plain chunks. A part that does not decode comes as zeros: so its checksums tell of
it as of any other damage, chunk by chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate

from keepstep.ckpt.encoding import SPAN_BYTES, EncodedImage
from keepstep.ckpt.keys import encoded_key, image_key
from keepstep.ckpt.manifest import ImageRecord, Manifest
from keepstep.ckpt.zstd_frames import NotDecodable, content, decode_span
from keepstep.storage.errors import TooLarge, Truncated
from keepstep.storage.read_only import ReadOnly
from keepstep.storage.store import Capabilities, ObjectInfo, Store
from keepstep.storage.writer import as_bytes_view


def plain_view(store: Store, manifest: Manifest) -> Store:
    """`store`, with every image of the manifest under its `image_key` and `stored_key`, as a plain
    one.

    The store itself, whose files can then be used where they lie, if none is encoded.
    """
    return PlainView(store, manifest) if manifest.encoded else store


class _Image:
    """One encoded image: where its parts are."""

    def __init__(self, key: str, record: ImageRecord, encoded: EncodedImage) -> None:
        self.key = key
        self.record = record
        self.encoded = encoded
        sizes = (span.stored_bytes for span in encoded.spans)
        self.starts = list(accumulate(sizes, initial=encoded.header_bytes))


class PlainView(ReadOnly):
    """A read-only store. Thread-safe; holds some 40 MB for each thread that reads.

    Keys that are no encoded image of the manifest are those of the store behind it.
    """

    why_read_only = "the view of a checkpoint's images can only be read; write to the store itself"

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._images: dict[str, _Image] = {}
        self._last = threading.local()
        records = {record.rank: record for record in manifest.images}
        for encoded in manifest.encoded:
            key = encoded_key(manifest.state, encoded.rank)
            image = _Image(key, records[encoded.rank], encoded)
            self._images[key] = self._images[image_key(manifest.state, encoded.rank)] = image

    @property
    def url(self) -> str:
        """Of the store behind it."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """Of the store behind it; but nothing can be written here."""
        return self._store.capabilities

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        image = self._images.get(key)
        if image is None:
            return self._store.get(key, bytes_max)
        size_bytes = image.record.size_bytes
        if size_bytes > bytes_max:
            raise TooLarge(
                f"get {key!r} in {self.url}: {size_bytes} bytes, expected at most {bytes_max}",
                operation="get",
                key=key,
                where=self.url,
            )
        return self.get_range(key, 0, size_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        if key not in self._images:
            return self._store.get_range(key, offset, length)
        data = bytearray(length)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`. What does not decode comes as zeros."""
        image = self._images.get(key)
        if image is None:
            self._store.read_into(key, offset, target)
            return
        if offset < 0:
            raise ValueError(f"read_into {key!r}: offset {offset} is negative")
        view = as_bytes_view(target)
        if offset + view.nbytes > image.record.size_bytes:
            raise self._cut(image, f"bytes {offset} to {offset + view.nbytes} asked for")
        header_bytes = image.record.header_bytes
        if offset < header_bytes and view.nbytes:
            head = self._header(image)[offset : offset + view.nbytes]
            view[: len(head)] = head
            view, offset = view[len(head) :], offset + len(head)
        start = offset - header_bytes
        while view.nbytes:
            number, skipped = divmod(start, SPAN_BYTES)
            length = min(self._span_bytes(image, number) - skipped, view.nbytes)
            self._read_span(image, number, skipped, view[:length])
            view, start = view[length:], start + length

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`; the size is that of the plain image.

        Raises Truncated if what is stored has another size than its frames together.
        """
        image = self._images.get(key)
        if image is None:
            return self._store.stat(key)
        info = self._store.stat(image.key)
        if info.size_bytes != image.encoded.size_bytes:
            raise self._cut(image, f"it has {info.size_bytes}")
        return ObjectInfo(key, image.record.size_bytes, info.modified_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`: what is stored, as it is stored."""
        return self._store.list(prefix)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.leftovers`."""
        return self._store.leftovers(prefix)

    def _header(self, image: _Image) -> bytes:
        stored = self._store.get_range(image.key, 0, image.encoded.header_bytes)
        try:
            return content(stored, image.record.header_bytes)
        except NotDecodable:
            return bytes(image.record.header_bytes)

    def _span_bytes(self, image: _Image, number: int) -> int:
        data_bytes = image.record.size_bytes - image.record.header_bytes
        return min(SPAN_BYTES, data_bytes - number * SPAN_BYTES)

    def _read_span(self, image: _Image, number: int, skipped: int, target: memoryview) -> None:
        """Fill `target` from byte `skipped` of a span on."""
        if target.nbytes == self._span_bytes(image, number):
            self._decode(image, number, target)
            return
        # Who reads a part of a span reads its other parts next, as a rule.
        if getattr(self._last, "span", None) != (image.key, number):
            data = memoryview(bytearray(self._span_bytes(image, number)))
            self._last.span = None
            self._decode(image, number, data)
            self._last.data, self._last.span = data, (image.key, number)
        target[:] = self._last.data[skipped : skipped + target.nbytes]

    def _decode(self, image: _Image, number: int, target: memoryview) -> None:
        span = image.encoded.spans[number]
        stored = self._store.get_range(image.key, image.starts[number], span.stored_bytes)
        try:
            decode_span(memoryview(stored), span, target)
        except NotDecodable:
            target[:] = bytes(target.nbytes)

    def _cut(self, image: _Image, found: str) -> Truncated:
        return Truncated(
            f"{image.key} in {self.url}: expected {image.encoded.size_bytes} bytes for an image of "
            f"{image.record.size_bytes}, by its frames in the manifest; {found}",
            key=image.key,
            where=self.url,
        )

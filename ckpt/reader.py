"""Reading a committed checkpoint by regions, without torch and without holding much of it.

Whatever layout wrote the checkpoint, a region of a global tensor comes back as one numpy array. No
byte is given out before the checksum of its chunk was compared. `diff`, `reshard`, export and the
norms of `show` all read through this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from keepstep.ckpt.arrays import NUMPY_DTYPES, RAW_DTYPES, Array
from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_digest, digest128
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.errors import Corrupt
from keepstep.ckpt.fetch import fetch_header
from keepstep.ckpt.image import ImageHeader, ImageItem
from keepstep.ckpt.keys import manifest_key, stored_key
from keepstep.ckpt.lineage import Committed
from keepstep.ckpt.manifest import MANIFEST_BYTES_MAX, Manifest, TensorSpec, decode_manifest
from keepstep.ckpt.plain_view import plain_view
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import (
    Box,
    Region,
    intersect,
    relative_to,
    slices,
    strides,
    whole,
)
from keepstep.ckpt.slabs import SLAB_BYTES, slabs
from keepstep.storage.store import Store

_CACHED_CHUNKS = 32
_CACHED_ITEMS = 200_000


class CheckpointReader:
    """One checkpoint, open for reading. Not thread-safe: one per thread.

    Holds at most some 64 MB beside what it returns; 40 MB more if the images are encoded.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._images = plain_view(store, manifest)
        self._plan = Plan(manifest.mesh, manifest.placements, manifest.tensors)
        self._records = {record.rank: record for record in manifest.images}
        self._headers: OrderedDict[int, ImageHeader] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._scratch = memoryview(b"")

    def spec(self, name: str) -> TensorSpec:
        """Shape, dtype and placement of a tensor, by its name or alias. Raises KeyError."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def pieces(self, name: str, bytes_max: int = SLAB_BYTES) -> Iterator[tuple[Box, Array]]:
        """The whole tensor in row-major order, as arrays of at most `bytes_max` bytes with places.

        Nothing for an empty tensor. Raises as `read`.
        """
        spec = self.spec(name)
        for box in slabs(whole(spec.shape), DTYPES[spec.dtype].itemsize, bytes_max):
            yield box, self.read(name, box)

    def read(self, name: str, box: Box | None = None) -> Array:
        """A region of a tensor (None: all of it), as an array of the box's sizes.

        Element types are those of `arrays.NUMPY_DTYPES`; bits are exactly those stored.

        Raises:
            KeyError: no such tensor.
            Corrupt: a checksum does not match; names file, tensor and offset.
            FormatError: an image is not what the manifest says.
            StoreError: the store cannot be read.
        """
        name = self.manifest.aliases.get(name, name)
        spec = self.manifest.tensors[name]
        box = whole(spec.shape) if box is None else box
        dtype = DTYPES[spec.dtype]
        out = np.empty(box.sizes, RAW_DTYPES[dtype.itemsize])
        for rank, owned in self._plan.owners(Region(name, box)):
            common = intersect(box, owned)
            if common is not None:
                item = self._header(rank).item(name, spec, owned)
                for part in slabs(common, dtype.itemsize, SLAB_BYTES, within=owned):
                    out[slices(relative_to(part, box))] = self._part(rank, item, part)
        return out.view(NUMPY_DTYPES[spec.dtype])

    def _part(self, rank: int, item: ImageItem, part: Box) -> Array:
        """A part of one image's box, as a view of bytes that were checked; until the next call."""
        steps = strides(item.box.sizes, item.dtype.itemsize)
        offsets = relative_to(part, item.box).offsets
        start = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
        span = sum((size - 1) * step for size, step in zip(part.sizes, steps, strict=True))
        data = self._checked(rank, item.offset + start, span + item.dtype.itemsize)
        return np.ndarray(part.sizes, RAW_DTYPES[item.dtype.itemsize], data, 0, steps)

    def _header(self, rank: int) -> ImageHeader:
        """The header of a rank's image, checked against the manifest. Kept for the next call."""
        header = self._headers.get(rank)
        if header is None:
            header = self._headers[rank] = fetch_header(
                self._images, self.manifest, self._records, rank
            )
            kept = sum(len(each.items) for each in self._headers.values())
            while kept > _CACHED_ITEMS and len(self._headers) > 1:
                kept -= len(self._headers.popitem(last=False)[1].items)
        self._headers.move_to_end(rank)
        return header

    def _checked(self, rank: int, start: int, size_bytes: int) -> memoryview:
        """Bytes [start, start + size_bytes) of an image's data, whose checksums match.

        Valid until the next call.
        """
        header = self._header(rank)
        end = start + size_bytes
        first, last = start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES
        base = first * CHUNK_BYTES
        known = self._chunks.get((rank, first)) if first == last else None
        if known is not None:
            self._chunks.move_to_end((rank, first))
            return memoryview(known)[start - base : end - base]
        data = self._room(min((last + 1) * CHUNK_BYTES, header.data_bytes) - base)
        key = stored_key(self.manifest, rank)
        self._images.read_into(key, header.header_bytes + base, data)
        for number in range(first, last + 1):
            offset = number * CHUNK_BYTES - base
            chunk = data[offset : offset + CHUNK_BYTES]
            digest = chunk_digest(chunk)
            if digest != header.digests[number]:
                raise _corrupt(key, header, number, digest)
            if number in (first, last):
                # The neighbouring tensor or the next piece begins in the same chunk.
                self._chunks[rank, number] = bytes(chunk)
        while len(self._chunks) > _CACHED_CHUNKS:
            self._chunks.popitem(last=False)
        return data[start - base : end - base]

    def _room(self, size_bytes: int) -> memoryview:
        """Memory to read into; the same each time, since new memory costs more than reading."""
        if size_bytes > self._scratch.nbytes:
            self._scratch = memoryview(bytearray(size_bytes))
        return self._scratch[:size_bytes]


def open_checkpoint(store: Store, commit: Committed) -> CheckpointReader:
    """The checkpoint that `commit` names, open for reading.

    Raises:
        Corrupt: the manifest is not the one that was committed.
        FormatError: it is not a manifest of this format.
        StoreError: the store cannot be read.
    """
    key = manifest_key(commit.state)
    data = store.get(key, MANIFEST_BYTES_MAX)
    digest = digest128(data)
    if digest != commit.manifest_digest:
        raise Corrupt(key, "", f"digest {commit.manifest_digest}, as committed", digest)
    return CheckpointReader(store, decode_manifest(data, key))


def _corrupt(key: str, header: ImageHeader, number: int, digest: str) -> Corrupt:
    offset = number * CHUNK_BYTES
    names = header.names_at(offset, CHUNK_BYTES)
    return Corrupt(
        key,
        f"chunk {number} of the data ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})",
        header.digests[number],
        digest,
        tensor=names[0] if names else None,
        offset=header.header_bytes + offset,
    )

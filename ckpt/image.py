"""The image: all that one rank owns of one state, as one valid safetensors file (DESIGN D4).

    8 bytes          length of the JSON with its padding, little-endian
    JSON, spaces     so many that the data begins at a multiple of 4,096 bytes
    data             the tensors without holes, by item size descending, small ones last, by name

The JSON begins with ``__metadata__``, whose first key is ``chunks``: the checksums of all chunks of
data, 16 hex digits each, at a place and of a length that are known before the data is. So a header
is built once per plan; `at` gives it another state, and `seal` writes the checksums into it.

Everything in a header follows from what `build` is given. `parse` therefore builds it anew, and
takes no byte that differs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from keepstep.ckpt.checksum import CHUNK_DIGITS, chunk_count, digest128
from keepstep.ckpt.dtypes import DTYPES, Dtype
from keepstep.ckpt.errors import FormatError, NotRepresentable, PlacementError
from keepstep.ckpt.keys import image_key, state_name
from keepstep.ckpt.manifest import (
    ALIGNMENT_BYTES,
    EXTENT_MAX,
    FORMAT_VERSION,
    HEADER_BYTES_MAX,
    ImageRecord,
    State,
    TensorSpec,
)
from keepstep.ckpt.names import check_job, check_name
from keepstep.ckpt.placement import DIMS_MAX, Mesh, check_mesh, mesh_size
from keepstep.ckpt.region import Box
from keepstep.ckpt.safetensors_file import LENGTH_BYTES

SMALL_BYTES = 1 << 16
"""Parts of a tensor with fewer bytes lie together, behind the others of their item size."""

CHUNKS_AT = LENGTH_BYTES + len('{"__metadata__":{"chunks":"')
"""Where the checksums begin in the file."""

_STATE_KEY = '","state":"'


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One tensor's part in an image.

    Attributes:
        dtype: the element type.
        shape: shape of the *global* tensor.
        box: which part of it this is.
        offset: where its bytes begin, counted from the start of the data.
        size_bytes: how many there are.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    box: Box
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A header, built or parsed. `items` is in the order of the data.

    Attributes:
        digests: the chunks' checksums; () before the image is sealed.
        header_bytes: length of the header in the file; where the data begins.
        data_bytes: length of the data.
        encoded: the header's bytes, with zeros for checksums if it is not sealed.
    """

    job: str
    state: State
    rank: int
    mesh: Mesh
    plan_digest: str
    items: dict[str, ImageItem]
    digests: tuple[str, ...]
    data_bytes: int
    encoded: bytes

    @property
    def header_bytes(self) -> int:
        return len(self.encoded)

    @property
    def size_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.encoded) + self.data_bytes

    def at(self, state: State) -> ImageHeader:
        """The same header for another state, not sealed. Costs one copy of the bytes."""
        start = self.encoded.index(_STATE_KEY.encode()) + len(_STATE_KEY)
        encoded = bytearray(self.encoded)
        name = state_name(state).encode()
        encoded[start : start + len(name)] = name
        digits = CHUNK_DIGITS * chunk_count(self.data_bytes)
        encoded[CHUNKS_AT : CHUNKS_AT + digits] = b"0" * digits
        return replace(self, state=state, digests=(), encoded=bytes(encoded))

    def item(self, name: str, spec: TensorSpec, box: Box) -> ImageItem:
        """The item `name`, which must be `box` of a tensor like `spec`.

        Raises FormatError, naming the file, if it is not, or there is none.
        """
        item = self.items.get(name)
        if item is None or (item.dtype.name, item.shape, item.box) != (spec.dtype, spec.shape, box):
            raise FormatError(
                image_key(self.state, self.rank),
                f"tensors[{name!r}]",
                f"{spec.dtype} {spec.shape} {box}, by the manifest's plan",
                "none" if item is None else f"{item.dtype.name} {item.shape} {item.box}",
            )
        return item

    def names_at(self, offset: int, size_bytes: int) -> list[str]:
        """The tensors with bytes in data range [offset, offset + size_bytes), in order."""
        names = list(self.items)
        starts = [item.offset for item in self.items.values()]
        first = max(bisect_right(starts, offset) - 1, 0)
        found = []
        for name in names[first:]:
            item = self.items[name]
            if item.offset >= offset + size_bytes:
                break
            if item.size_bytes and item.offset + item.size_bytes > offset:
                found.append(name)
        return found


def build(
    job: str,
    state: State,
    rank: int,
    mesh: Mesh,
    plan_digest: str,
    items: Mapping[str, tuple[str, tuple[int, ...], Box]],
) -> ImageHeader:
    """The header of an image of `items`: name -> (dtype name, global shape, box of it).

    Not sealed yet. Raises BadName, PlacementError or NotRepresentable for what an image cannot
    hold, ValueError for a state or rank out of bounds.
    """
    check_job(job)
    check_mesh(mesh)
    if not 0 <= rank < mesh_size(mesh):
        raise PlacementError(f"rank {rank} is not one of the mesh's {mesh_size(mesh)}")
    if len(plan_digest) != 32 or not set(plan_digest) <= set("0123456789abcdef"):
        raise ValueError(f"plan digest {plan_digest[:100]!r} is not 32 lower-case hex digits")
    placed, data_bytes = _placed(items)
    encoded = _encoded(job, state, rank, mesh, plan_digest, placed, data_bytes)
    return ImageHeader(job, state, rank, mesh, plan_digest, placed, (), data_bytes, encoded)


def items_of(
    tensors: Mapping[str, TensorSpec], owned: Mapping[str, Box]
) -> dict[str, tuple[str, tuple[int, ...], Box]]:
    """What `build` takes, of the boxes of tensors that a rank owns."""
    return {name: (tensors[name].dtype, tensors[name].shape, box) for name, box in owned.items()}


def seal(header: ImageHeader, digests: Sequence[str]) -> bytes:
    """The header's bytes with the checksums of the data's chunks written into it.

    Raises ValueError for another number of checksums than the data has chunks.
    """
    count = chunk_count(header.data_bytes)
    text = "".join(digests).encode()
    if len(digests) != count or len(text) != CHUNK_DIGITS * count:
        raise ValueError(f"{len(digests)} checksums for the {count} chunks of this image")
    encoded = bytearray(header.encoded)
    encoded[CHUNKS_AT : CHUNKS_AT + len(text)] = text
    return bytes(encoded)


def image_record(header: ImageHeader, sealed: bytes) -> ImageRecord:
    """What the manifest says of an image whose sealed header is `sealed`."""
    return ImageRecord(header.rank, header.size_bytes, header.header_bytes, digest128(sealed))


def _placed(
    items: Mapping[str, tuple[str, tuple[int, ...], Box]],
) -> tuple[dict[str, ImageItem], int]:
    """The items in the order of the data, each at its offset, and the data's length."""
    sized = []
    for name, (dtype_name, shape, box) in items.items():
        dtype = DTYPES.get(dtype_name)
        if dtype is None:
            raise NotRepresentable(name, f"no dtype {dtype_name[:100]!r} in the format")
        check_name(name)
        fault = box_fault(shape, box)
        if fault is not None:
            raise PlacementError(f"tensor {name!r}: {fault}")
        is_small = box.volume * dtype.itemsize < SMALL_BYTES
        sized.append((-dtype.itemsize, is_small, name, dtype, shape, box))
    # Small ones together share a few chunks: a rank that needs all the optimizer's step counts
    # reads one chunk for them, and not one for each.
    sized.sort(key=lambda entry: entry[:3])
    placed: dict[str, ImageItem] = {}
    offset = 0
    for _, _, name, dtype, shape, box in sized:
        size_bytes = box.volume * dtype.itemsize
        placed[name] = ImageItem(dtype, shape, box, offset, size_bytes)
        offset += size_bytes
    if offset > EXTENT_MAX:
        raise PlacementError(f"an image of {offset} bytes; at most {EXTENT_MAX}")
    return placed, offset


def box_fault(shape: tuple[int, ...], box: Box) -> str | None:
    """Why `box` cannot be a part of a tensor of this shape, or None if it can."""
    if not len(shape) == len(box.offsets) == len(box.sizes):
        return f"shape {shape} and box {box} have different numbers of dims"
    if len(shape) > DIMS_MAX:
        return f"has {len(shape)} dims, at most {DIMS_MAX}"
    for length, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        if not 0 <= offset <= offset + size <= length <= EXTENT_MAX:
            return f"box {box} is not inside shape {shape}, or a dim is over {EXTENT_MAX}"
    return None


def _encoded(
    job: str,
    state: State,
    rank: int,
    mesh: Mesh,
    plan_digest: str,
    items: dict[str, ImageItem],
    data_bytes: int,
) -> bytes:
    """The header's bytes, with zeros for checksums."""
    entries: dict[str, object] = {
        "__metadata__": {
            "chunks": "0" * (CHUNK_DIGITS * chunk_count(data_bytes)),
            "job": job,
            "keepstep": str(FORMAT_VERSION),
            "mesh": ",".join(f"{axis.name}={axis.size}" for axis in mesh.axes),
            "plan": plan_digest,
            "rank": str(rank),
            "state": state_name(state),
            "tensors": msgspec.json.encode(list(map(_part, items.values()))).decode(),
        }
    }
    for name, item in items.items():
        entries[name] = {
            "data_offsets": (item.offset, item.offset + item.size_bytes),
            "dtype": item.dtype.stored,
            "shape": item.box.sizes if item.dtype.is_native else (item.size_bytes,),
        }
    text = msgspec.json.encode(entries)
    total = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    length = total - LENGTH_BYTES
    if length > HEADER_BYTES_MAX:
        raise NotRepresentable(
            "image", f"{len(items)} tensors need a header of {length} bytes; use more ranks"
        )
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def _part(item: ImageItem) -> tuple[object, ...]:
    """Which part of its tensor an item is: () for the whole of a tensor of a native type.

    Else (shape, offsets), and for a type that is stored as bytes (shape, offsets, sizes, type).
    """
    if not item.dtype.is_native:
        return item.shape, item.box.offsets, item.box.sizes, item.dtype.name
    if item.box.sizes == item.shape:
        return ()
    return item.shape, item.box.offsets

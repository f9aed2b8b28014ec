"""Plain safetensors files, as other programs write and read them: the header, and where data lies.

Our own images are such files too, but say more and are checked more strictly (`image`). Here are
only the format's own rules: 8 bytes of little-endian length, a JSON header, the data without holes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from keepstep.ckpt.document import decode, shortened
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.errors import Foreign, FormatError
from keepstep.ckpt.foreign import seems
from keepstep.ckpt.placement import DIMS_MAX
from keepstep.storage.store import Buffer

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 25_000_000
"""A quarter of what the format allows, and far more than any Llama needs."""
_SIZE_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: dtype name, shape, and its bytes [start, end) counted from the file's."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def header_length(
    head: Buffer,
    size_bytes: int,
    file: str,
    what: str = "a safetensors file",
    length_max: int = HEADER_BYTES_MAX,
) -> int:
    """The length of the JSON header, from the first bytes of a file of `size_bytes`.

    Raises:
        Foreign: the file is of another kind.
        FormatError: it is too short, or the header would be too long.
    """
    kind = seems(head)
    if kind is not None:
        raise Foreign(file, "", what, kind)
    if len(head) < LENGTH_BYTES:
        raise FormatError(file, "", f"at least {LENGTH_BYTES} bytes", f"{size_bytes}: truncated")
    length = int.from_bytes(bytes(head[:LENGTH_BYTES]), "little")
    if length > length_max:
        raise FormatError(file, "header length", f"at most {length_max} bytes", f"{length}")
    if LENGTH_BYTES + length > size_bytes:
        raise FormatError(
            file,
            "header length",
            f"at most the {size_bytes - LENGTH_BYTES} bytes that follow it",
            f"{length}: truncated, or not {what}",
        )
    return length


def parse_header(header: bytes, size_bytes: int, file: str) -> dict[str, StoredTensor]:
    """The tensors of a file of `size_bytes` whose JSON header is `header`.

    Raises:
        FormatError: names the tensor and field that is not as the format says: unknown dtypes,
            sizes that do not match, ranges that overlap, leave holes or leave the file.
    """
    raw = decode(header, dict[str, msgspec.Raw], bytes_max=HEADER_BYTES_MAX, file=file)
    base = LENGTH_BYTES + len(header)
    tensors = {
        name: _tensor(entry, base, f"{file}: {shortened(name)}")
        for name, entry in raw.items()
        if name != "__metadata__"
    }
    end, last = base, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise FormatError(
                file,
                f"{shortened(name)}.data_offsets",
                f"to begin where {shortened(last)} ends, at {end - base}",
                f"{tensor.start - base}",
            )
        end, last = tensor.end, name
    if end != size_bytes:
        raise FormatError(file, "", f"{end} bytes by its header", f"{size_bytes}")
    return tensors


def _tensor(entry: msgspec.Raw, base: int, where: str) -> StoredTensor:
    """One entry of the header, checked by itself."""
    found = decode(bytes(entry), _Entry, bytes_max=HEADER_BYTES_MAX, file=where)
    dtype = DTYPES.get(found.dtype)
    if dtype is None or not dtype.is_native:
        raise FormatError(where, "dtype", "a known element type", shortened(found.dtype))
    if len(found.shape) > DIMS_MAX or any(not 0 <= size < _SIZE_MAX for size in found.shape):
        raise FormatError(
            where, "shape", f"at most {DIMS_MAX} sizes from 0 on", shortened(str(found.shape))
        )
    start, end = found.data_offsets
    size_bytes = math.prod(found.shape) * dtype.itemsize
    if start < 0 or end - start != size_bytes:
        raise FormatError(
            where, "data_offsets", f"{size_bytes} bytes for this shape", f"[{start}, {end}]"
        )
    return StoredTensor(found.dtype, tuple(found.shape), base + start, base + end)


def build_header(
    items: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Length and JSON header of a file with these tensors (name, dtype, shape), in this order.

    Padded with spaces so that the data begins at a multiple of 8 bytes.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in items:
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header

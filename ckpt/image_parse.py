"""Reading an image's header: bytes that anybody may have written, to an `ImageHeader` or an error.

What it refuses is in the order of the checks: too long or too short, another kind of file, a newer
version, not the JSON of a header, names and types and boxes that cannot be, data that does not lie
as the order and sizes say, a file longer or shorter than its header says. Last, the header is built
anew from what was read, and a byte that differs is refused: so there is one way to write a header.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from keepstep.ckpt.checksum import CHUNK_DIGITS, chunk_count
from keepstep.ckpt.document import check_distinct_keys, explained, first_fault, shortened
from keepstep.ckpt.errors import CheckpointError, Foreign, FormatError, NewerVersion
from keepstep.ckpt.image import ImageHeader, build, seal
from keepstep.ckpt.keys import parse_state_name
from keepstep.ckpt.manifest import EXTENT_MAX, FORMAT_VERSION, HEADER_BYTES_MAX
from keepstep.ckpt.placement import DIMS_MAX, Mesh, MeshAxis
from keepstep.ckpt.region import Box
from keepstep.ckpt.safetensors_file import LENGTH_BYTES, header_length
from keepstep.storage.store import Buffer

# Refused before it is decoded: a list of 10^7 numbers would take 100 times its length in memory.
_LONG_LIST = re.compile(rb"\[[0-9,\s]{%d}" % (DIMS_MAX * 20))
_MESH = re.compile(r"(?:[A-Za-z0-9_]{1,32}=[0-9]{1,6},)*")
_HEX = re.compile(r"[0-9a-f]*")
_INDEX = re.compile(r"[0-9]{1,6}")
_MESH_CHARS_MAX = 1_024
_IMPORT = "`keepstep import` reads models of other programs."

_Extent = Annotated[int, msgspec.Meta(ge=0, le=EXTENT_MAX)]
_Parts = list[list[tuple[_Extent, ...] | str]]


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    """A value of the header's object: a tensor's entry, or under ``__metadata__`` ours.

    One type for both, since the decoder can then check all of it in one pass.
    """

    dtype: str | UnsetType = UNSET
    shape: tuple[_Extent, ...] | UnsetType = UNSET
    data_offsets: tuple[_Extent, _Extent] | UnsetType = UNSET
    chunks: str | UnsetType = UNSET
    job: str | UnsetType = UNSET
    keepstep: str | UnsetType = UNSET
    mesh: str | UnsetType = UNSET
    plan: str | UnsetType = UNSET
    rank: str | UnsetType = UNSET
    state: str | UnsetType = UNSET
    tensors: str | UnsetType = UNSET


class _Metadata(msgspec.Struct, frozen=True):
    """``__metadata__``, complete."""

    chunks: str
    job: str
    keepstep: str
    mesh: str
    plan: str
    rank: str
    state: str
    tensors: str


class _Version(msgspec.Struct):
    keepstep: str | UnsetType = UNSET


class _Peek(msgspec.Struct):
    """Just what tells our versions, and other people's safetensors files, apart."""

    metadata: _Version | UnsetType = msgspec.field(name="__metadata__", default=UNSET)


def header_size(head: Buffer, file: str, size_bytes: int) -> int:
    """Length of the header of an image of `size_bytes` that begins with `head` (>= 8 bytes of it).

    Raises FormatError if that is no image: too short, too long a header, another kind of file.
    """
    what = "an image (safetensors)"
    return LENGTH_BYTES + header_length(head, size_bytes, file, what, HEADER_BYTES_MAX)


def parse(data: Buffer, file: str, size_bytes: int | None = None) -> ImageHeader:
    """The sealed header that `data` is, whole and with nothing after it.

    Args:
        data: the first `header_size` bytes of the file.
        file: what messages call it.
        size_bytes: length of the whole file, where it is known: then it must be right.

    Raises FormatError (Foreign, NewerVersion) and nothing else.
    """
    encoded = bytes(data)
    stated = header_size(encoded, file, len(encoded))
    if stated != len(encoded):
        raise FormatError(
            file, "header length", f"{len(encoded) - LENGTH_BYTES}", f"{stated - LENGTH_BYTES}"
        )
    nodes = _nodes(encoded[LENGTH_BYTES:], file)
    metadata = _metadata(nodes, file)
    state = parse_state_name(metadata.state)
    if state is None:
        raise _wrong(file, "state", "gGGGGGG/sSSSSSSSSSSSS", metadata.state)
    if _INDEX.fullmatch(metadata.rank) is None:
        raise _wrong(file, "rank", "a number", metadata.rank)
    items = _items(nodes, metadata.tensors, file)
    try:
        mesh = _mesh(metadata.mesh, file)
        header = build(metadata.job, state, int(metadata.rank), mesh, metadata.plan, items)
    except FormatError:
        raise
    except (CheckpointError, ValueError) as error:
        raise FormatError(
            file, "header", "what an image can hold", shortened(str(error))
        ) from error
    _check_layout(header, nodes, file)
    digests = _digests(metadata.chunks, header.data_bytes, file)
    if seal(header, digests) != encoded:
        raise _difference(seal(header, digests), encoded, file)
    if size_bytes is not None and size_bytes != header.size_bytes:
        raise FormatError(
            file, "size", f"{header.size_bytes} bytes, as its header says", f"{size_bytes}"
        )
    return replace(header, digests=digests, encoded=encoded)


def _nodes(text: bytes, file: str) -> dict[str, _Node]:
    """The header's JSON object, typed; or the error that says best what is wrong with it."""
    if _LONG_LIST.search(text) is not None:
        raise FormatError(file, "shape", f"at most {DIMS_MAX} dims", "a much longer list")
    try:
        nodes = msgspec.json.decode(text, type=dict[str, _Node])
    except (ValueError, RecursionError) as error:
        _check_ours(text, file)
        raise _fault(text, file, error) from error
    metadata = nodes.get("__metadata__")
    if metadata is None or metadata.keepstep != str(FORMAT_VERSION):
        _check_ours(text, file)
    if text.count(b'"data_offsets":') != len(nodes) - 1:
        check_distinct_keys(text, file)
    return nodes


def _fault(text: bytes, file: str, error: Exception) -> FormatError:
    """What is wrong with a header that could not be decoded, by tensor if it is one tensor's."""
    try:
        fault = first_fault(text, _Node)
    except (ValueError, RecursionError):
        fault = None  # not JSON at all
    if fault is None:
        return FormatError(file, "header", *explained(str(error))[1:])
    name, (field, expected, found) = fault
    return FormatError(file, _entry(name) + (f".{field}" if field else ""), expected, found)


def _check_ours(text: bytes, file: str) -> None:
    """Raise Foreign or NewerVersion if `text` is a header, but not ours, or of a newer format."""
    try:
        peek = msgspec.json.decode(text, type=_Peek)
    except (ValueError, RecursionError):
        return  # not even a header: the caller has a more exact error
    version = UNSET if peek.metadata is UNSET else peek.metadata.keepstep
    if version is UNSET:
        found = "a safetensors file that keepstep did not write"
        raise Foreign(file, "__metadata__.keepstep", str(FORMAT_VERSION), found, _IMPORT)
    if _INDEX.fullmatch(version) is None or int(version) < 1:
        raise _wrong(file, "keepstep", str(FORMAT_VERSION), version)
    if int(version) > FORMAT_VERSION:
        raise NewerVersion(file, "__metadata__.keepstep", FORMAT_VERSION, int(version))


def _metadata(nodes: dict[str, _Node], file: str) -> _Metadata:
    """Take ``__metadata__`` out of `nodes`."""
    node = nodes.pop("__metadata__", None)
    if node is None:
        raise FormatError(file, "__metadata__", "an object", "nothing")
    try:
        return msgspec.convert(msgspec.to_builtins(node), _Metadata)
    except msgspec.ValidationError as error:
        raise FormatError(file, "__metadata__", *explained(str(error))[1:]) from error


def _items(
    nodes: dict[str, _Node], parts_text: str, file: str
) -> dict[str, tuple[str, tuple[int, ...], Box]]:
    """What `build` was given: each tensor's logical dtype, global shape and box."""
    try:
        parts = msgspec.json.decode(parts_text, type=_Parts)
    except (ValueError, RecursionError) as error:
        raise FormatError(file, "__metadata__.tensors", *explained(str(error))[1:]) from error
    if len(parts) != len(nodes):
        raise _wrong(file, "tensors", f"{len(nodes)} parts", f"{len(parts)}")
    items = {}
    for (name, node), part in zip(nodes.items(), parts, strict=True):
        if node.dtype is UNSET or node.shape is UNSET or node.data_offsets is UNSET:
            expected = "dtype, shape and data_offsets"
            raise FormatError(file, _entry(name), expected, "not all of them")
        match part:
            case []:
                items[name] = node.dtype, node.shape, Box((0,) * len(node.shape), node.shape)
            case [tuple() as shape, tuple() as offsets]:
                items[name] = node.dtype, shape, Box(offsets, node.shape)
            case [tuple() as shape, tuple() as offsets, tuple() as sizes, str() as dtype]:
                items[name] = dtype, shape, Box(offsets, sizes)
            case _:
                expected = "[], [shape, offsets] or [shape, offsets, sizes, dtype]"
                field = f"__metadata__.tensors of {shortened(name)!r}"
                raise FormatError(file, field, expected, shortened(str(part)))
    return items


def _mesh(text: str, file: str) -> Mesh:
    """The mesh in ``__metadata__.mesh``, such as ``pp=1,tp=2``."""
    if len(text) > _MESH_CHARS_MAX or _MESH.fullmatch(f"{text}," if text else "") is None:
        raise _wrong(file, "mesh", "AXIS=SIZE,...", text)
    pairs = [word.split("=") for word in text.split(",")] if text else []
    return Mesh(tuple(MeshAxis(name, int(size)) for name, size in pairs))


def _check_layout(header: ImageHeader, nodes: dict[str, _Node], file: str) -> None:
    """Raise FormatError unless the data lies in the header as order and sizes of tensors say."""
    for (name, item), (stated, node) in zip(header.items.items(), nodes.items(), strict=True):
        if name != stated:
            expected = "tensors by item size descending, small ones last, then by name"
            raise FormatError(file, "header", f"{expected}: {shortened(name)!r}", _entry(stated))
        if node.dtype != item.dtype.stored:
            raise FormatError(
                file, f"{_entry(name)}.dtype", item.dtype.stored, shortened(str(node.dtype))
            )
        shape = item.box.sizes if item.dtype.is_native else (item.size_bytes,)
        if node.shape != shape:
            raise FormatError(file, f"{_entry(name)}.shape", f"{shape}", shortened(str(node.shape)))
        offsets = (item.offset, item.offset + item.size_bytes)
        if node.data_offsets != offsets:
            field = f"{_entry(name)}.data_offsets"
            expected = f"{list(offsets)} (no hole, no overlap)"
            raise FormatError(file, field, expected, shortened(str(node.data_offsets)))


def _digests(text: str, data_bytes: int, file: str) -> tuple[str, ...]:
    """The checksums in ``__metadata__.chunks``."""
    count = chunk_count(data_bytes)
    if len(text) != CHUNK_DIGITS * count or _HEX.fullmatch(text) is None:
        expected = f"{count} times {CHUNK_DIGITS} lower-case hex digits"
        raise _wrong(file, "chunks", expected, f"{len(text)} characters: {text}")
    starts = range(0, len(text), CHUNK_DIGITS)
    return tuple(text[start : start + CHUNK_DIGITS] for start in starts)


def _difference(expected: bytes, found: bytes, file: str) -> FormatError:
    """Two headers that mean the same, where only the first is written as the format says."""
    places = (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    at = next(places, min(len(expected), len(found)))
    window = slice(max(at - 8, 0), at + 24)
    return FormatError(
        file,
        f"header byte {at}",
        f"{expected[window]!r} ({len(expected)} bytes in all)",
        f"{found[window]!r} ({len(found)} bytes in all)",
    )


def _wrong(file: str, key: str, expected: str, found: str) -> FormatError:
    return FormatError(file, f"__metadata__.{key}", expected, shortened(repr(found)))


def _entry(name: str) -> str:
    return f"header[{shortened(name)!r}]"

"""Strict, bounded JSON documents: how manifests and log entries are written and read.

Written: UTF-8, keys sorted, no space, no NaN. Read: within a bound in bytes and depth, no unknown
field, no duplicate key, no type but the declared one. The reader does not insist on the writer's
way to write numbers and spaces; digests say whether the bytes are those that were written.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypeVar, get_args

import msgspec

from keepstep.ckpt.errors import Foreign, FormatError, NewerVersion, NotRepresentable
from keepstep.ckpt.foreign import seems
from keepstep.ckpt.values import why_not_json
from keepstep.storage.store import Buffer

_FOUND_CHARS_MAX = 120

T = TypeVar("T")


class _Versioned(msgspec.Struct):
    """Just the format's number: read first, so that a newer file is not called broken."""

    format: Any = None


def encode(document: msgspec.Struct) -> bytes:
    """The document as canonical JSON: equal documents make equal bytes.

    Free values must have passed `check_json`: NaN, for one, would become null here.
    """
    return msgspec.json.encode(document, order="sorted")


def decode(
    data: Buffer, type_: type[T], *, bytes_max: int, file: str, version_known: int | None = None
) -> T:
    """The document in `data`, or a FormatError that names `file` and field.

    Raises NewerVersion if `version_known` is given and the field ``format`` is a higher number,
    Foreign if the bytes seem to be of another kind of file.
    """
    size_bytes = memoryview(data).nbytes
    if size_bytes > bytes_max:
        raise FormatError(file, "", f"at most {bytes_max} bytes", f"{size_bytes}")
    kind = seems(data)
    if kind is not None:
        raise Foreign(file, "", "JSON", kind)
    try:
        if version_known is not None:
            _check_version(data, version_known, file)
        document = msgspec.json.decode(data, type=type_)
        if msgspec.json.encode(document, order="sorted") != data:
            check_distinct_keys(bytes(data), file)
    except FormatError:
        raise
    except msgspec.ValidationError as error:
        field, expected, found = explained(str(error))
        raise FormatError(file, _with_key(field, data, type_), expected, found) from error
    except (msgspec.DecodeError, UnicodeError, json.JSONDecodeError) as error:
        raise FormatError(file, "", "JSON", shortened(str(error))) from error
    except (RecursionError, OverflowError, ValueError) as error:
        raise FormatError(file, "", "JSON within bounds", shortened(str(error))) from error
    return document


def check_distinct_keys(text: bytes, file: str) -> None:
    """Raise FormatError if an object in `text`, which is JSON, has a key twice. Slow."""
    try:
        json.loads(text.decode(), object_pairs_hook=_distinct)
    except _DuplicateKeyError as error:
        found = f"{shortened(str(error))!r} twice"
        raise FormatError(file, "", "distinct keys", found) from error


def check_json(value: object, field: str) -> None:
    """Raise NotRepresentable unless `value` comes back from JSON as the same value."""
    reason = why_not_json(value)
    if reason is not None:
        raise NotRepresentable(field, reason)


def shortened(text: str) -> str:
    """`text`, or its beginning if it is too long for a message."""
    return text if len(text) <= _FOUND_CHARS_MAX else text[:_FOUND_CHARS_MAX] + "..."


def explained(message: str) -> tuple[str, str, str]:
    """(field, expected, found) from msgspec's sentence, such as "Expected `int` - at `$.a[0]`"."""
    sentence, _, path = message.partition(" - at `$")
    expected, comma, found = sentence.partition(", got ")
    field = shortened(path.rstrip("`").lstrip("."))
    if comma:
        return field, shortened(expected.removeprefix("Expected ")), shortened(found)
    return field, "what the format says", shortened(sentence[:1].lower() + sentence[1:])


def first_fault(text: Buffer, type_: object) -> tuple[str, tuple[str, str, str]] | None:
    """The first value of the JSON object `text` that is not of `type_`: its key, and `explained`.

    For messages: the decoder itself leaves out which key of a dict it was.
    """
    for key, value in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items():
        try:
            msgspec.json.decode(value, type=type_)
        except msgspec.ValidationError as error:
            return key, explained(str(error))
    return None


def _with_key(field: str, data: Buffer, type_: type) -> str:
    """`field`, such as ``tensors[...].shape``, with the key that is wrong in place of the dots."""
    root, dots, _ = field.partition("[...]")
    if not dots:
        return field
    try:
        fault = first_fault(*_dict_at(root, data, type_))
    except (LookupError, ValueError, RecursionError):
        return field  # deeper than one dict, or no JSON any more after the fault
    if fault is None:
        return field
    key, (rest, _, _) = fault
    return f"{root}[{shortened(key)!r}]" + (f".{rest}" if rest else "")


def _dict_at(root: str, data: Buffer, type_: type) -> tuple[Buffer, object]:
    """The dict that is field `root` of the document ("": the document), and its values' type."""
    if not root:
        return data, get_args(type_)[1]
    types = {each.encode_name: each.type for each in msgspec.structs.fields(type_)}
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return memoryview(fields[root]), get_args(types[root])[1]


class _DuplicateKeyError(Exception):
    """A key for the second time in one object. Never leaves this file."""


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(key for key, _ in pairs)
    raise _DuplicateKeyError(counts.most_common(1)[0][0])


def _check_version(data: Buffer, known: int, file: str) -> None:
    version = msgspec.json.decode(data, type=_Versioned).format
    if isinstance(version, int) and version > known:
        raise NewerVersion(file, "format", known, version)
    if version is not None and (not isinstance(version, int) or version < 1):
        raise FormatError(file, "format", f"1 to {known}", shortened(repr(version)))

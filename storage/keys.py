"""Keys: the names of objects, and why none of them can leave a store.

A key is 1 to 1,000 characters: segments joined by "/". A segment matches
``[A-Za-z0-9][A-Za-z0-9._=-]*`` and has at most 200 characters. So no segment is "", ".", ".." or
hidden, and no key is absolute. What a store makes for itself beside its objects begins with ".".
"""

from __future__ import annotations

import re

from keepstep.storage.errors import BadKey

KEY_CHARACTERS_MAX = 1_000
SEGMENT_CHARACTERS_MAX = 200

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,199}")
_SHOWN_CHARACTERS_MAX = 120


def is_segment(name: str) -> bool:
    """Whether `name` may stand between two slashes of a key."""
    return _SEGMENT.fullmatch(name) is not None


def is_key(key: str) -> bool:
    """Whether `key` is well formed."""
    return len(key) <= KEY_CHARACTERS_MAX and all(map(is_segment, key.split("/")))


def check_key(key: str, *, operation: str = "", where: str = "") -> tuple[str, ...]:
    """The segments of `key`. Raises BadKey, naming the segment that is wrong."""
    if len(key) > KEY_CHARACTERS_MAX:
        raise BadKey(
            f"a key has {len(key)} characters, at most {KEY_CHARACTERS_MAX} are allowed:"
            f" {_shown(key)}",
            operation=operation,
            key=key,
            where=where,
        )
    segments = tuple(key.split("/"))
    for segment in segments:
        if not is_segment(segment):
            raise BadKey(
                f"key {_shown(key)} has the segment {_shown(segment)}; expected a letter or digit,"
                f" then letters, digits and . _ = -, together at most {SEGMENT_CHARACTERS_MAX}",
                operation=operation,
                key=key,
                where=where,
            )
    return segments


def check_prefix(prefix: str, *, operation: str = "", where: str = "") -> tuple[str, ...]:
    """The segments of `prefix`: "" (none), or a key followed by "/". Raises BadKey."""
    if prefix == "":
        return ()
    if not prefix.endswith("/"):
        raise BadKey(
            f'prefix {_shown(prefix)} does not end in "/"; expected "" or a key and "/"',
            operation=operation,
            key=prefix,
            where=where,
        )
    return check_key(prefix[:-1], operation=operation, where=where)


def _shown(text: str) -> str:
    """`text` as a person may safely see it: quoted, control characters escaped, bounded."""
    if len(text) > _SHOWN_CHARACTERS_MAX:
        return repr(text[:_SHOWN_CHARACTERS_MAX]) + "..."
    return repr(text)

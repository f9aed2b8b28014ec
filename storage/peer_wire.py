"""What a peer store's client and server say to each other: paths, headers, errors. Pure.

    GET    /v1/NAME/KEY                the object; `Range: bytes=A-B` must lie inside it
    HEAD   /v1/NAME/KEY                its size and time
    PUT    /v1/NAME/KEY                write it whole; `If-None-Match: *`: only if the key is free
    PUT    /v1/NAME/KEY?stream=SIZE    write it from frames: 4 bytes of length, big-endian, data;
                                       last the length WHOLE, or ABANDONED: write nothing
    DELETE /v1/NAME/KEY
    GET    /v1/NAME?list=PREFIX&after=KEY     one page of a listing
    GET    /v1/NAME?leftovers=PREFIX
    GET    /v1/NAME?capabilities
    POST   /v1/NAME?sweep              an object's line of a listing

An answer that is no success has the kind of error in the header ERROR_HEADER, and all of it as JSON
in its body, where it has one.
"""

from __future__ import annotations

import re

import msgspec

from keepstep.storage import errors
from keepstep.storage.errors import StoreError
from keepstep.storage.store import ObjectInfo

ERROR_HEADER = "Keepstep-Error"
MODIFIED_HEADER = "Keepstep-Modified"

PAGE_OBJECTS = 1_000
LEFTOVERS_MAX = 100_000
LISTING_BYTES_MAX = 1 << 28
ERROR_BYTES_MAX = 1 << 16
ABSENT_BYTES_MAX = 1 << 26
"""The largest object that `put_if_absent` takes here: log entries and manifests."""
FRAME_BYTES_MAX = 1 << 20

WHOLE = 0xFFFF_FFFF
ABANDONED = 0xFFFF_FFFE

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_MESSAGE_CHARS_MAX = 4_000

_STATUS: dict[type[StoreError], int] = {
    errors.Transient: 503,
    errors.Throttled: 429,
    errors.OutcomeUnknown: 502,
    errors.Permanent: 422,
    errors.NotFound: 404,
    errors.AlreadyExists: 412,
    errors.Truncated: 416,
    errors.TooLarge: 413,
    errors.BadKey: 400,
    errors.NoSpace: 507,
    errors.Denied: 403,
}
_KINDS = {kind.__name__: kind for kind in _STATUS}


class WireError(msgspec.Struct, frozen=True):
    """An error as JSON. `error` is the name of a class of `storage.errors`."""

    error: str
    message: str
    errno: int | None = None


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """One object of a listing."""

    key: str
    size_bytes: int
    modified_s: float

    def info(self) -> ObjectInfo:
        """As stores have it."""
        return ObjectInfo(self.key, self.size_bytes, self.modified_s)


class Page(msgspec.Struct, frozen=True):
    """A page of a listing. `is_last`: there is nothing behind it."""

    objects: tuple[Listed, ...]
    is_last: bool


class WireCapabilities(msgspec.Struct, frozen=True):
    """`store.Capabilities` as JSON."""

    put_if_absent: bool
    durable: bool


def listed(info: ObjectInfo) -> Listed:
    """An object as listings have it."""
    return Listed(info.key, info.size_bytes, info.modified_s)


def encode_error(error: StoreError) -> tuple[int, str, bytes]:
    """Status, value of ERROR_HEADER, and body of the answer that tells of `error`."""
    kind = next((each for each in type(error).__mro__ if each in _STATUS), errors.Permanent)
    body = WireError(kind.__name__, str(error)[:_MESSAGE_CHARS_MAX], error.errno)
    return _STATUS[kind], kind.__name__, msgspec.json.encode(body)


def decode_error(
    status: int, name: str | None, body: bytes, *, is_read: bool
) -> tuple[type[StoreError], str, int | None]:
    """The kind of error, its message and errno, of an answer that is no success.

    An answer that is not a peer store's own (a proxy's, a crashed handler's) says nothing of what
    happened: a read may be tried again; of a write the outcome is unknown.
    """
    kind = _KINDS.get(name or "")
    if kind is None:
        if status == 401:
            return errors.Denied, "the job token is refused; use that of this job", None
        if status >= 500:
            unclear = errors.Transient if is_read else errors.OutcomeUnknown
            return unclear, f"status {status} and no reason", None
        return errors.Permanent, f"status {status}, which no peer store answers here", None
    try:
        told = msgspec.json.decode(body, type=WireError)
    except (msgspec.DecodeError, UnicodeError):
        return kind, f"status {status}", None
    return kind, told.message, told.errno


def parse_range(header: str) -> tuple[int, int] | None:
    """Offset and length (at least 1) of a Range header, or None if it is another kind of one."""
    match = _RANGE.fullmatch(header)
    if match is None or int(match[2]) < int(match[1]):
        return None
    return int(match[1]), int(match[2]) - int(match[1]) + 1


def range_header(offset: int, length: int) -> str:
    """The Range header of `length` (at least 1) bytes from `offset`."""
    return f"bytes={offset}-{offset + length - 1}"

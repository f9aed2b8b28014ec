"""The one interface to a durable place: what every store promises, whatever is behind it.

A store maps keys to immutable byte strings. A key is one or more segments joined by "/"; a segment
matches ``[A-Za-z0-9][A-Za-z0-9._=-]*`` and is at most 200 characters; a key is at most 1,000.
Readers never see a half-written object: an object is absent, or whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: its key, its size in bytes, and when the store says it was written.

    `modified_s` is the store's clock (seconds since the epoch): for people's eyes only, no decision
    may compare it with another host's clock.
    """

    key: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond put, get and list."""

    put_if_absent: bool
    """Two writers racing for one key: exactly one wins, the other gets AlreadyExists."""
    durable: bool
    """What was acknowledged survives a power loss."""


class SingleWriterWarning(UserWarning):
    """A store is used without put-if-absent, on the word that only one run ever writes to it."""


@runtime_checkable
class Store(Protocol):
    """A durable place. Safe to use from several threads of one process.

    Every method raises a `StoreError` of `storage.errors` and nothing else of its own.
    """

    @property
    def url(self) -> str:
        """Where this store is, as a person would write it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do. May have to ask it, by writing; remembered from then on."""

    def put(self, key: str, data: Buffer) -> None:
        """Write the object whole, replacing an older one atomically. Durable on return.

        On an error the older object, if any, is still there and still whole.
        """

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """As `put`, from chunks that together have exactly `size_bytes` bytes.

        Holds at most one chunk, or a bounded number of bounded parts, at a time. Raises ValueError,
        and writes nothing, if the chunks have another total.
        """

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write the object if the key is free; else raise AlreadyExists. Durable on return."""

    def get(self, key: str, bytes_max: int) -> bytes:
        """The whole object. Raises NotFound, or TooLarge before reading more than `bytes_max`."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length). Raises NotFound; Truncated if the object is shorter."""

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """Fill `target` (writable, contiguous bytes) from `offset` on. Raises as `get_range`."""

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of the object. Raises NotFound."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` ("" or a string ending in "/"), sorted by key.

        Objects put or deleted meanwhile may or may not be listed; all others are, exactly once.
        Unfinished writes are never listed.
        """

    def delete(self, key: str) -> None:
        """Remove the object. No error if there is none. Durable on return."""

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """What interrupted writes left behind under `prefix`; `key` is the key it was meant for.

        For `gc`, which decides by the key alone whether a leftover may be swept.
        """

    def sweep(self, leftover: ObjectInfo) -> None:
        """Remove what `leftovers` named. No error if it is gone."""

"""The writing half of a store that can only be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from keepstep.storage.errors import Permanent
from keepstep.storage.store import Buffer, ObjectInfo


class ReadOnly(ABC):
    """Refuses every write. To be a base of a store, which has `url`.

    Attributes:
        why_read_only: the end of the refusal's sentence: what can only be read, and what to do.
    """

    why_read_only: str

    @property
    @abstractmethod
    def url(self) -> str:
        """See `Store.url`."""

    def put(self, key: str, data: Buffer) -> None:
        """Raises Permanent."""
        raise self._refusal("put", key)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """Raises Permanent."""
        raise self._refusal("put_stream", key)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Raises Permanent."""
        raise self._refusal("put_if_absent", key)

    def delete(self, key: str) -> None:
        """Raises Permanent."""
        raise self._refusal("delete", key)

    def sweep(self, leftover: ObjectInfo) -> None:
        """Raises Permanent."""
        raise self._refusal("sweep", leftover.key)

    def _refusal(self, operation: str, key: str) -> Permanent:
        return Permanent(
            f"{operation} {key!r} in {self.url}: {self.why_read_only}",
            operation=operation,
            key=key,
            where=self.url,
        )

"""A store in this process's memory: for tests, and the shortest reading of what a store must do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from keepstep.storage.errors import AlreadyExists, BadKey, NotFound, TooLarge, Truncated
from keepstep.storage.keys import check_key, check_prefix
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo
from keepstep.storage.writer import as_bytes_view


class MemoryStore:
    """Objects in a dictionary; gone when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        """For messages; it cannot be opened from elsewhere."""
        return f"memory://{id(self):x}"

    @property
    def capabilities(self) -> Capabilities:
        """Atomic, not durable."""
        return Capabilities(put_if_absent=True, durable=False)

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self._put("put", key, bytes(as_bytes_view(data)), replace=True)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """See `Store.put_stream`."""
        check_key(key, operation="put_stream", where=self.url)
        data = b"".join(as_bytes_view(chunk) for chunk in chunks)
        if len(data) != size_bytes:
            raise ValueError(f"{key}: chunks have {len(data)} bytes, expected {size_bytes}")
        self._put("put_stream", key, data, replace=True)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`."""
        self._put("put_if_absent", key, bytes(as_bytes_view(data)), replace=False)

    def _put(self, operation: str, key: str, data: bytes, *, replace: bool) -> None:
        segments = check_key(key, operation=operation, where=self.url)
        above = {"/".join(segments[:n]) for n in range(1, len(segments))}
        with self._lock:
            for other in self._objects:
                # As on a file system, a name is an object or a directory, never both.
                if other in above or other.startswith(key + "/"):
                    raise BadKey(
                        f"{operation} {key!r} in {self.url}: {other!r} is an object, and one of the"
                        " two keys would have to be its directory; choose another key",
                        operation=operation,
                        key=key,
                        where=self.url,
                    )
            if not replace and key in self._objects:
                raise AlreadyExists(
                    f"{operation} {key!r} in {self.url}: the key is taken; read it to see by whom",
                    operation=operation,
                    key=key,
                    where=self.url,
                )
            self._objects[key] = (data, time.time())

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        data, _ = self._find("get", key)
        if len(data) > bytes_max:
            raise TooLarge(
                f"get {key!r} in {self.url}: {len(data)} bytes, expected at most {bytes_max}",
                operation="get",
                key=key,
                where=self.url,
            )
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        return self._range("get_range", key, offset, length)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`."""
        view = as_bytes_view(target)
        if target.readonly:
            raise ValueError(f"read_into {key!r}: the target is read-only")
        data = self._range("read_into", key, offset, target.nbytes)
        if data:
            view[:] = data

    def _range(self, operation: str, key: str, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0:
            raise ValueError(f"{operation} {key!r}: offset {offset}, length {length}: negative")
        data, _ = self._find(operation, key)
        if offset + length > len(data):
            raise Truncated(
                f"{operation} {key!r} in {self.url}: bytes {offset} to {offset + length} asked for,"
                f" the object has {len(data)}",
                operation=operation,
                key=key,
                where=self.url,
            )
        return data[offset : offset + length]

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        data, modified_s = self._find("stat", key)
        return ObjectInfo(key, len(data), modified_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. Shows the store as it was at this call."""
        check_prefix(prefix, operation="list", where=self.url)
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        return (ObjectInfo(key, len(data), modified_s) for key, (data, modified_s) in found)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key, operation="delete", where=self.url)
        with self._lock:
            self._objects.pop(key, None)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """None: a write here is never half done."""
        check_prefix(prefix, operation="leftovers", where=self.url)
        return iter(())

    def sweep(self, leftover: ObjectInfo) -> None:
        """Nothing to remove."""
        check_key(leftover.key, operation="sweep", where=self.url)

    def _find(self, operation: str, key: str) -> tuple[bytes, float]:
        check_key(key, operation=operation, where=self.url)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFound(
                f"{operation} {key!r} in {self.url}: no such object",
                operation=operation,
                key=key,
                where=self.url,
            )
        return found

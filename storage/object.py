"""A store in any file system that fsspec knows, for one writer.

An object is written beside its place under a temporary name, then moved there; where a move is a
copy, as on object stores, the copy is what readers see at once. What fsspec does not promise, this
does not either: that an acknowledged object survives a power loss, and that two writers who create
the same name are told apart. For a local directory `FileStore` promises both, and `S3Store` for a
bucket.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem

from keepstep.storage.errors import (
    AlreadyExists,
    BadKey,
    NotFound,
    Permanent,
    StoreError,
    TooLarge,
    Truncated,
)
from keepstep.storage.keys import check_key, check_prefix, is_key
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo, SingleWriterWarning
from keepstep.storage.translate import Moment, translate
from keepstep.storage.writer import as_bytes_view

_TEMPORARY = re.compile(r"\.keepstep-tmp-(?P<name>[A-Za-z0-9._=-]+)~[0-9a-f]{16}")
_GONE = (FileNotFoundError, NotADirectoryError)


class FsspecStore:
    """Objects under `root` of an fsspec file system, which is made if it is missing.

    Safe between threads of one process.

    Args:
        file_system: fsspec's object for it.
        root: a path in it.
        url: what messages call this store.
        single_writer: do without put-if-absent: look, then write. Two runs that write here at the
            same time then overwrite each other's log. Warns (SingleWriterWarning).
    """

    def __init__(
        self,
        file_system: AbstractFileSystem,
        root: str,
        *,
        url: str,
        single_writer: bool = False,
    ) -> None:
        self._fs = file_system
        self._root = root.rstrip("/")
        self._url = url
        self._single_writer = single_writer
        self._lock = threading.Lock()
        if single_writer:
            warnings.warn(
                f"{url}: single_writer is set. If two runs ever write here at the same time, they"
                " overwrite each other's log, and committed checkpoints are lost.",
                SingleWriterWarning,
                stacklevel=2,
            )

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Nothing that fsspec does not promise."""
        return Capabilities(put_if_absent=self._single_writer, durable=False)

    # Writing.

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self._publish("put", key, [data], None)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """See `Store.put_stream`."""
        self._publish("put_stream", key, chunks, size_bytes)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`. Permanent without `single_writer`."""
        operation = "put_if_absent"
        check_key(key, operation=operation, where=self.url)
        if not self._single_writer:
            raise self._error(
                Permanent,
                operation,
                key,
                "fsspec does not promise that two writers are kept apart here; use another store,"
                " or, if only one run ever writes here, add ?single_writer=true to the store's URL",
            )
        with self._lock, self._typed(operation, key):
            if self._fs.isfile(self._full(key)):
                raise self._error(
                    AlreadyExists, operation, key, "the key is taken; read it to see by whom"
                )
            self._publish(operation, key, [data], None)

    def _publish(
        self, operation: str, key: str, chunks: Iterable[Buffer], size_bytes: int | None
    ) -> None:
        *above, name = check_key(key, operation=operation, where=self.url)
        with self._typed(operation, key):
            self._check_no_clash(operation, key, above)
            parent = "/".join((self._root, *above))
            self._fs.makedirs(parent, exist_ok=True)
            temporary = f"{parent}/.keepstep-tmp-{name}~{os.urandom(8).hex()}"
            is_moved = False
            try:
                self._fill(temporary, key, chunks, size_bytes)
                with self._typed(operation, key, Moment.PUBLISHING):
                    self._fs.mv(temporary, f"{parent}/{name}")
                is_moved = True
            finally:
                if not is_moved:
                    # What cannot be removed now is a leftover, which gc knows.
                    with suppress(OSError):
                        self._fs.rm_file(temporary)

    def _fill(
        self, temporary: str, key: str, chunks: Iterable[Buffer], size_bytes: int | None
    ) -> None:
        done = 0
        with self._fs.open(temporary, "wb") as file:
            for chunk in chunks:
                view = as_bytes_view(chunk)
                done += view.nbytes
                if size_bytes is not None and done > size_bytes:
                    raise ValueError(f"{key}: chunks have more than the {size_bytes} bytes stated")
                file.write(view)
        if size_bytes is not None and done != size_bytes:
            raise ValueError(f"{key}: chunks have {done} bytes, expected {size_bytes}")

    def _check_no_clash(self, operation: str, key: str, above: list[str]) -> None:
        """A move onto a directory would move into it."""
        parents = ("/".join(above[:depth]) for depth in range(1, len(above) + 1))
        if self._fs.isdir(self._full(key)) or any(self._fs.isfile(self._full(p)) for p in parents):
            raise self._error(
                BadKey,
                operation,
                key,
                "one name would have to be an object and the directory of others; choose another"
                " key",
            )

    def delete(self, key: str) -> None:
        """See `Store.delete`. Directories stay."""
        check_key(key, operation="delete", where=self.url)
        with self._typed("delete", key), suppress(*_GONE):
            if self._fs.isfile(self._full(key)):
                self._fs.rm_file(self._full(key))

    # Reading.

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        check_key(key, operation="get", where=self.url)
        with self._opened("get", key) as (file, size_bytes):
            if size_bytes > bytes_max:
                raise self._error(
                    TooLarge, "get", key, f"{size_bytes} bytes, expected at most {bytes_max}"
                )
            data = bytearray(size_bytes)
            self._read("get", key, file, 0, memoryview(data), size_bytes)
        return bytes(data)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        check_key(key, operation="get_range", where=self.url)
        if length < 0:
            raise ValueError(f"get_range {key!r}: length {length}: negative")
        data = bytearray(length)
        with self._opened("get_range", key) as (file, size_bytes):
            self._read("get_range", key, file, offset, memoryview(data), size_bytes)
        return bytes(data)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`."""
        check_key(key, operation="read_into", where=self.url)
        view = as_bytes_view(target)
        if target.readonly:
            raise ValueError(f"read_into {key!r}: the target is read-only")
        with self._opened("read_into", key) as (file, size_bytes):
            self._read("read_into", key, file, offset, view, size_bytes)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        check_key(key, operation="stat", where=self.url)
        with self._typed("stat", key):
            if not self._fs.isfile(self._full(key)):
                raise FileNotFoundError(errno.ENOENT, "no such object")
            info = self._fs.info(self._full(key))
            return ObjectInfo(key, info["size"], _modified_s(info))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. Shows the store as it was at the first item; holds all of it."""
        check_prefix(prefix, operation="list", where=self.url)
        return self._listed(prefix)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.leftovers`. A write that is still going on is among them."""
        check_prefix(prefix, operation="leftovers", where=self.url)
        return (info for info, _ in self._left_over("leftovers", prefix))

    def sweep(self, leftover: ObjectInfo) -> None:
        """See `Store.sweep`. One that has grown since it was listed is being written: it stays."""
        segments = check_key(leftover.key, operation="sweep", where=self.url)
        prefix = "".join(f"{segment}/" for segment in segments[:-1])
        for info, path in tuple(self._left_over("sweep", prefix)):
            if info == leftover:
                with self._typed("sweep", leftover.key), suppress(*_GONE):
                    self._fs.rm_file(path)

    # What they are made of.

    def _full(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _opened(self, operation: str, key: str) -> Iterator[tuple[BinaryIO, int]]:
        """The object, open for reading, and its size: both of one version of it."""
        with self._typed(operation, key):
            if not self._fs.isfile(self._full(key)):
                raise FileNotFoundError(errno.ENOENT, "no such object")
            with self._fs.open(self._full(key), "rb", cache_type="none") as file:
                yield file, file.seek(0, os.SEEK_END)

    def _read(
        self,
        operation: str,
        key: str,
        file: BinaryIO,
        offset: int,
        target: memoryview,
        size_bytes: int,
    ) -> None:
        if offset < 0:
            raise ValueError(f"{operation} {key!r}: offset {offset}: negative")
        if offset + target.nbytes <= size_bytes:
            file.seek(offset)
            filled = 0
            while filled < target.nbytes and (piece := file.read(target.nbytes - filled)):
                target[filled : filled + len(piece)] = piece
                filled += len(piece)
            if filled == target.nbytes:
                return
        raise self._error(
            Truncated,
            operation,
            key,
            f"bytes {offset} to {offset + target.nbytes} asked for, the object has {size_bytes}",
        )

    def _found(self, operation: str, prefix: str) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Every file under `prefix`: its name below the root, what it is, and its path."""
        found: dict[str, dict[str, Any]] = {}
        with self._typed(operation, prefix), suppress(*_GONE):
            found = self._fs.find(self._full(prefix).rstrip("/"), detail=True)
        root = self._fs._strip_protocol(self._root).rstrip("/") + "/"
        for path, info in found.items():
            name = path.removeprefix(root)
            if info["type"] == "file" and name != path and name.startswith(prefix):
                yield name, info, path

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [
            ObjectInfo(name, info["size"], _modified_s(info))
            for name, info, _ in self._found("list", prefix)
            if is_key(name)
        ]
        found.sort(key=lambda info: info.key)
        yield from found

    def _left_over(self, operation: str, prefix: str) -> Iterator[tuple[ObjectInfo, str]]:
        for found, info, path in self._found(operation, prefix):
            above, slash, name = found.rpartition("/")
            temporary = _TEMPORARY.fullmatch(name)
            if temporary is not None and is_key(key := above + slash + temporary["name"]):
                yield ObjectInfo(key, info["size"], _modified_s(info)), path

    @contextmanager
    def _typed(self, operation: str, key: str, moment: Moment = Moment.BEFORE) -> Iterator[None]:
        """Turns every OSError of the block into a StoreError."""
        try:
            yield
        except StoreError:
            raise  # NotFound and a few others are OSErrors as well
        except OSError as error:
            if isinstance(error, FileNotFoundError) and moment is Moment.BEFORE:
                raise self._error(NotFound, operation, key, "no such object") from error
            raise translate(error, operation, key, self.url, moment) from error

    def _error(self, kind: type[StoreError], operation: str, key: str, what: str) -> StoreError:
        return kind(
            f"{operation} {key!r} in {self.url}: {what}",
            operation=operation,
            key=key,
            where=self.url,
        )


def _modified_s(info: dict[str, Any]) -> float:
    """When fsspec says that it was written; the file systems do not agree on the name."""
    for name in ("mtime", "LastModified", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if value is not None and hasattr(value, "timestamp"):
            return float(value.timestamp())
    return 0.0

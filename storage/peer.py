"""A store on another host, over HTTP: the client of `peer_server`.

Reads go straight into the caller's memory, over connections that stay open. What a read raises if
the peer is gone, hangs, or ends before it sent all, is Transient: ask again, or ask another. The
outcome of a write that broke off is unknown, unless no connection could be made at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar
from urllib.parse import urlencode

import msgspec

from keepstep.storage import peer_wire as wire
from keepstep.storage.connections import (
    Answer,
    ConnectionFailed,
    Connections,
    NotConnected,
    Sending,
    Upload,
)
from keepstep.storage.errors import (
    OutcomeUnknown,
    Permanent,
    StoreError,
    TooLarge,
    Transient,
    Truncated,
)
from keepstep.storage.keys import check_key, check_prefix
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo
from keepstep.storage.token import Token
from keepstep.storage.writer import as_bytes_view

T = TypeVar("T")

_HTTP_END = b"0\r\n\r\n"
_NOT_FINAL = "; try again, or read another copy"
_UNKNOWN = "; read the key to learn whether it happened"


class PeerStore:
    """The store that the data plane at `address` calls `name`. A `Store`, for several threads.

    Args:
        address: "host:port" of a keeper's data plane.
        name: "memory" (its pool) or "disk" (its directory).
        token: the job's.
        timeout_s: how long it may be silent: longer, and it counts as gone.
    """

    def __init__(self, address: str, name: str, token: Token, timeout_s: float) -> None:
        self._path = f"/v1/{name}"
        self._url = f"http://{address}{self._path}"
        self._connections = Connections(address, {"Authorization": token.header}, timeout_s)
        self._capabilities: Capabilities | None = None

    @property
    def url(self) -> str:
        """``http://host:port/v1/NAME``."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store there; asked for once."""
        if self._capabilities is None:
            data = self._ask("capabilities", "", "GET", f"{self._path}?capabilities")
            told = self._decoded("capabilities", "", data, wire.WireCapabilities)
            self._capabilities = Capabilities(told.put_if_absent, told.durable)
        return self._capabilities

    def close(self) -> None:
        """Close the connections that lie idle. The store can be used again."""
        self._connections.close()

    # Writing.

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        check_key(key, operation="put", where=self._url)
        self._write("put", key, "PUT", self._object(key), as_bytes_view(data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`. TooLarge above `peer_wire.ABSENT_BYTES_MAX`."""
        check_key(key, operation="put_if_absent", where=self._url)
        view = as_bytes_view(data)
        if view.nbytes > wire.ABSENT_BYTES_MAX:
            found = f"{view.nbytes} bytes, expected at most {wire.ABSENT_BYTES_MAX}"
            raise self._error(TooLarge, "put_if_absent", key, found)
        absent = {"If-None-Match": "*"}
        self._write("put_if_absent", key, "PUT", self._object(key), view, absent)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """See `Store.put_stream`. Holds one chunk at a time."""
        check_key(key, operation="put_stream", where=self._url)

        def send(upload: Upload) -> None:
            try:
                _send_frames(upload, key, chunks, size_bytes)
            except BaseException:
                with suppress(ConnectionFailed):
                    upload.send(_http_chunk(wire.ABANDONED.to_bytes(4, "big")) + _HTTP_END)
                    upload.settle()  # the peer has forgotten it by then
                raise

        path = f"{self._object(key)}?stream={size_bytes}"
        endless = {"Content-Type": "application/octet-stream", "Transfer-Encoding": "chunked"}
        self._write("put_stream", key, "PUT", path, send, endless)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key, operation="delete", where=self._url)
        self._write("delete", key, "DELETE", self._object(key), b"")

    # Reading.

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        check_key(key, operation="get", where=self._url)
        with self._reading("get", key, "GET", self._object(key)) as answer:
            size_bytes = answer.size_bytes
            if size_bytes is not None and size_bytes > bytes_max:
                found = f"{size_bytes} bytes, expected at most {bytes_max}"
                raise self._error(TooLarge, "get", key, found)
            return answer.read(bytes_max)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        if length < 0:
            raise ValueError(f"get_range {key!r}: offset {offset}, length {length}: negative")
        data = bytearray(length)
        self._read_range("get_range", key, offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`. Straight from the socket into `target`."""
        view = as_bytes_view(target)
        if target.readonly:
            raise ValueError(f"read_into {key!r}: the target is read-only")
        self._read_range("read_into", key, offset, view)

    @contextmanager
    def reading(self, key: str, offset: int, length: int) -> Iterator[Answer]:
        """Bytes [offset, offset + length), length at least 1, to be read piece by piece.

        The object is read as it is sent, so that pieces can be looked at while the next arrive.
        Raises as `read_into`, also for what the `Answer` raises inside the `with`.
        """
        check_key(key, operation="read_into", where=self._url)
        with self._ranged("read_into", key, offset, length) as answer:
            yield answer

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        check_key(key, operation="stat", where=self._url)
        return self._stat("stat", key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. Fetched in pages."""
        check_prefix(prefix, operation="list", where=self._url)
        return self._listing(prefix)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.leftovers`. At most `peer_wire.LEFTOVERS_MAX` at a time."""
        check_prefix(prefix, operation="leftovers", where=self._url)
        return self._left_over(prefix)

    def sweep(self, leftover: ObjectInfo) -> None:
        """See `Store.sweep`."""
        check_key(leftover.key, operation="sweep", where=self._url)
        body = msgspec.json.encode(wire.listed(leftover))
        self._write("sweep", leftover.key, "POST", f"{self._path}?sweep", body)

    # Inside.

    def _object(self, key: str) -> str:
        return f"{self._path}/{key}"  # no character of a key has a meaning in a URL

    def _read_range(self, operation: str, key: str, offset: int, view: memoryview) -> None:
        check_key(key, operation=operation, where=self._url)
        length = view.nbytes
        if offset < 0:
            raise ValueError(f"{operation} {key!r}: offset {offset}, length {length}: negative")
        if length == 0:
            size_bytes = self._stat(operation, key).size_bytes
            if offset > size_bytes:
                found = f"bytes {offset} to {offset} asked for, the object has {size_bytes}"
                raise self._error(Truncated, operation, key, found)
            return
        with self._ranged(operation, key, offset, length) as answer:
            answer.fill(view)

    @contextmanager
    def _ranged(self, operation: str, key: str, offset: int, length: int) -> Iterator[Answer]:
        range_ = {"Range": wire.range_header(offset, length)}
        with self._reading(operation, key, "GET", self._object(key), range_) as answer:
            if answer.status != 206 or answer.size_bytes != length:
                found = f"status {answer.status} with {answer.size_bytes} bytes"
                expected = f"expected 206 with {length}{_NOT_FINAL}"
                raise self._error(Transient, operation, key, f"{found}, {expected}")
            yield answer

    def _stat(self, operation: str, key: str) -> ObjectInfo:
        with self._reading(operation, key, "HEAD", self._object(key)) as answer:
            size = answer.headers.get("Content-Length", "")
            modified = answer.headers.get(wire.MODIFIED_HEADER, "")
            answer.read(0)  # nothing, after which the connection can be used again
        try:
            return ObjectInfo(key, int(size), float(modified))
        except ValueError as error:
            found = f"size {size[:20]!r} and time {modified[:20]!r} are no numbers"
            raise self._error(Permanent, operation, key, found) from error

    def _listing(self, prefix: str) -> Iterator[ObjectInfo]:
        after = ""
        while True:
            query = urlencode({"list": prefix, "after": after})
            data = self._ask("list", prefix, "GET", f"{self._path}?{query}")
            page = self._decoded("list", prefix, data, wire.Page)
            for each in page.objects:
                yield each.info()
            if page.is_last or not page.objects:
                return
            after = page.objects[-1].key

    def _left_over(self, prefix: str) -> Iterator[ObjectInfo]:
        query = urlencode({"leftovers": prefix})
        data = self._ask("leftovers", prefix, "GET", f"{self._path}?{query}")
        for each in self._decoded("leftovers", prefix, data, wire.Page).objects:
            yield each.info()

    def _ask(self, operation: str, key: str, method: str, path: str) -> bytes:
        with self._reading(operation, key, method, path) as answer:
            return answer.read(wire.LISTING_BYTES_MAX)

    def _decoded(self, operation: str, key: str, data: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=type_)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise self._error(Permanent, operation, key, f"no answer of ours: {error}") from error

    @contextmanager
    def _reading(
        self,
        operation: str,
        key: str,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
    ) -> Iterator[Answer]:
        """The answer to a request that changes nothing. Every failure is Transient."""
        try:
            with self._connections.request(method, path, headers, may_repeat=True) as answer:
                if answer.status not in (200, 206):
                    self._refuse(operation, key, answer, is_read=True)
                yield answer
        except (NotConnected, ConnectionFailed) as error:
            raise self._error(Transient, operation, key, f"{error}{_NOT_FINAL}") from error

    def _write(
        self,
        operation: str,
        key: str,
        method: str,
        path: str,
        body: Buffer | Sending,
        headers: dict[str, str] | None = None,
    ) -> None:
        try:
            with self._connections.request(method, path, headers, body) as answer:
                if answer.status != 200:
                    self._refuse(operation, key, answer, is_read=False)
                answer.read(0)
        except NotConnected as error:
            raise self._error(Transient, operation, key, f"{error}; try again") from error
        except ConnectionFailed as error:
            raise self._error(OutcomeUnknown, operation, key, f"{error}{_UNKNOWN}") from error

    def _refuse(self, operation: str, key: str, answer: Answer, *, is_read: bool) -> NoReturn:
        name = answer.headers.get(wire.ERROR_HEADER)
        body = answer.read(wire.ERROR_BYTES_MAX)
        kind, message, number = wire.decode_error(answer.status, name, body, is_read=is_read)
        raise self._error(kind, operation, key, message, number)

    def _error(
        self,
        kind: type[StoreError],
        operation: str,
        key: str,
        why: str,
        number: int | None = None,
    ) -> StoreError:
        message = f"{operation} {key!r} in {self._url}: {why}"
        return kind(message, operation=operation, key=key, where=self._url, errno=number)


def _send_frames(upload: Upload, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
    sent = 0
    for chunk in chunks:
        view = as_bytes_view(chunk)
        sent += view.nbytes
        if sent > size_bytes:
            raise ValueError(f"{key}: chunks have more than the {size_bytes} bytes stated")
        for begin in range(0, view.nbytes, wire.FRAME_BYTES_MAX):
            part = view[begin : begin + wire.FRAME_BYTES_MAX]
            upload.send(_http_chunk(part.nbytes.to_bytes(4, "big") + part))
    if sent != size_bytes:
        raise ValueError(f"{key}: chunks have {sent} bytes, expected {size_bytes}")
    upload.send(_http_chunk(wire.WHOLE.to_bytes(4, "big")) + _HTTP_END)


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)

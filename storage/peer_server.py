"""Any store, served over HTTP to those who have the job's token: the server of `peer`.

Objects are sent by threads straight from a file (sendfile), or from memory, so that a slow disk or
a slow reader holds up nobody else. Every body that is taken is bounded.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from keepstep.storage import peer_wire as wire
from keepstep.storage.errors import (
    BadKey,
    Denied,
    Permanent,
    StoreError,
    TooLarge,
    Transient,
    Truncated,
)
from keepstep.storage.keys import check_key
from keepstep.storage.store import Buffer, Store
from keepstep.storage.token import Token

T = TypeVar("T")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SWEEP_BYTES_MAX = 1 << 12
READ_BYTES = 4 << 20
"""How much is sent, and has `timeout_s` to be taken, at a time."""


@runtime_checkable
class InFiles(Protocol):
    """A store whose objects are files."""

    def opened(self, key: str) -> AbstractContextManager[tuple[int, int]]:
        """Descriptor and size in bytes of an object."""


@runtime_checkable
class InMemory(Protocol):
    """A store whose objects are in this process's memory."""

    def view(self, key: str) -> memoryview:
        """The object. Raises as `Store.get`."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open object. `send(connection, offset, length)` blocks; raises OSError."""

    size_bytes: int
    modified_s: float
    send: Callable[[socket.socket, int, int], None]


def bearer(token: Token) -> Middleware:
    """The middleware that lets nobody pass without the token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not token.admits(request.headers.get("Authorization")):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check


def refusal(error: StoreError) -> web.Response:
    """The answer that tells of an error."""
    status, name, body = wire.encode_error(error)
    headers = {wire.ERROR_HEADER: name}
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


class StoreHandlers:
    """The routes of one store, below ``/v1/NAME``.

    Args:
        store: what is served.
        name: its name in paths.
        executor: threads for its blocking calls.
        timeout_s: how long a reader may take for READ_BYTES, and a writer be silent.
        is_writable: False: every write is refused.
    """

    def __init__(
        self, store: Store, name: str, executor: Executor, timeout_s: float, *, is_writable: bool
    ) -> None:
        self._store = store
        self._name = name
        self._executor = executor
        self._timeout_s = timeout_s
        self._is_writable = is_writable

    def routes(self) -> list[web.RouteDef]:
        """For `web.Application.add_routes`."""
        at, all_ = f"/v1/{self._name}/{{key:.*}}", f"/v1/{self._name}"
        return [
            web.get(at, self._typed(self._get), allow_head=False),
            web.head(at, self._typed(self._head)),
            web.put(at, self._typed(self._put)),
            web.delete(at, self._typed(self._delete)),
            web.get(all_, self._typed(self._look), allow_head=False),
            web.post(all_, self._typed(self._sweep)),
        ]

    def _typed(self, handler: Handler) -> Handler:
        async def call(request: web.Request) -> web.StreamResponse:
            try:
                if request.method not in ("GET", "HEAD") and not self._is_writable:
                    raise Denied(f"{self._store.url} is served for reading only")
                return await handler(request)
            except StoreError as error:
                return refusal(error)

        return call

    async def _run(self, call: Callable[[], T]) -> T:
        """The result of a blocking call; when cancelled, waits for its end all the same."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    # Reading.

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        if isinstance(self._store, InMemory):
            with self._opened(key) as source:  # does not block
                return await self._send(request, key, source)
        opening = self._opened(key)
        source = await self._run(opening.__enter__)
        try:
            return await self._send(request, key, source)
        finally:
            await self._run(lambda: opening.__exit__(None, None, None))

    async def _send(self, request: web.Request, key: str, source: Source) -> web.StreamResponse:
        wanted = request.headers.get("Range")
        offset, length, status = 0, source.size_bytes, 200
        if wanted is not None:
            span = wire.parse_range(wanted)
            if span is None:
                raise Permanent(f"Range {wanted[:100]!r}: expected bytes=FIRST-LAST")
            (offset, length), status = span, 206
        if offset + length > source.size_bytes:
            raise Truncated(
                f"bytes {offset} to {offset + length} asked for, the object has {source.size_bytes}"
            )
        response = web.StreamResponse(status=status, headers=_headers(source))
        response.content_length = length
        with suppress(aiohttp.ClientConnectionResetError):  # the reader is gone: nobody to tell
            await response.prepare(request)
            if length:
                await self._send_body(request, source, offset, length)
            await response.write_eof()
        return response

    async def _send_body(
        self, request: web.Request, source: Source, offset: int, length: int
    ) -> None:
        """Send the bytes behind the transport's back: it has nothing more of its own to send."""
        transport = request.transport
        if transport is None:
            raise aiohttp.ClientConnectionResetError("the reader is gone")
        connection: socket.socket = transport.get_extra_info("socket")
        own = socket.socket(fileno=os.dup(connection.fileno()))  # stays good if the loop closes it
        own.settimeout(self._timeout_s)

        def send() -> None:
            with closing(own):
                source.send(own, offset, length)

        try:
            while isinstance(transport, asyncio.Transport) and transport.get_write_buffer_size():
                await asyncio.sleep(0.001)  # a full socket: never seen with a head of 300 bytes
            running = asyncio.get_running_loop().run_in_executor(self._executor, send)
            await asyncio.shield(running)
        except asyncio.CancelledError:
            own.shutdown(socket.SHUT_RDWR)  # ends the thread's waiting
            await asyncio.wait([running])
            transport.abort()
            raise
        except (OSError, StoreError):
            transport.abort()  # the status is sent: only a cut body can tell the reader

    @contextmanager
    def _opened(self, key: str) -> Iterator[Source]:
        """The object, open. Blocking."""
        store = self._store
        check_key(key, operation="get", where=store.url)
        if isinstance(store, InFiles):
            with store.opened(key) as (fd, size_bytes):
                yield Source(size_bytes, os.fstat(fd).st_mtime, _file_sender(fd))
        elif isinstance(store, InMemory):
            with store.view(key) as view:
                yield Source(view.nbytes, 0.0, _memory_sender(view))
        else:
            info = store.stat(key)
            yield Source(info.size_bytes, info.modified_s, _store_sender(store, key))

    async def _head(self, request: web.Request) -> web.StreamResponse:
        info = await self._run(lambda: self._store.stat(request.match_info["key"]))
        response = web.StreamResponse(headers={wire.MODIFIED_HEADER: repr(info.modified_s)})
        response.content_length = info.size_bytes
        return response

    async def _look(self, request: web.Request) -> web.StreamResponse:
        """One of the questions about the whole store."""
        query = request.query
        body: msgspec.Struct
        if "list" in query:
            prefix, after = query["list"], query.get("after", "")
            body = await self._run(lambda: _page(self._store, prefix, after))
        elif "leftovers" in query:
            prefix = query["leftovers"]
            body = await self._run(lambda: _left_over(self._store, prefix))
        elif "capabilities" in query:
            can = await self._run(lambda: self._store.capabilities)
            body = wire.WireCapabilities(can.put_if_absent, can.durable)
        else:
            raise BadKey("expected ?list=, ?leftovers= or ?capabilities")
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    # Writing.

    async def _put(self, request: web.Request) -> web.StreamResponse:
        key = check_key_of(request, self._store)
        absent = request.headers.get("If-None-Match")
        if "stream" in request.query:
            size_bytes = _number(request.query["stream"])
            incoming = _Incoming(request, size_bytes, self._timeout_s, in_frames=True)
        else:
            size_bytes = _number(request.headers.get("Content-Length", ""))
            incoming = _Incoming(request, size_bytes, self._timeout_s, in_frames=False)
        if absent is None:
            await self._run(lambda: self._put_stream(key, incoming, size_bytes))
            return web.Response()
        if absent != "*":
            raise Permanent(f"If-None-Match {absent[:100]!r}: expected *")
        if size_bytes > wire.ABSENT_BYTES_MAX:
            raise TooLarge(f"{size_bytes} bytes, expected at most {wire.ABSENT_BYTES_MAX}")
        await self._run(lambda: self._put_absent(key, incoming))
        return web.Response()

    def _put_stream(self, key: str, incoming: _Incoming, size_bytes: int) -> None:
        try:
            self._store.put_stream(key, incoming, size_bytes)
        except (_BodyCutError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise Transient(f"nothing was written: {error}") from error

    def _put_absent(self, key: str, incoming: _Incoming) -> None:
        try:
            data = b"".join(incoming)
        except _BodyCutError as error:
            raise Transient(f"nothing was written: {error}") from error
        self._store.put_if_absent(key, data)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        await self._run(lambda: self._store.delete(request.match_info["key"]))
        return web.Response()

    async def _sweep(self, request: web.Request) -> web.StreamResponse:
        body = await read_bounded(request, SWEEP_BYTES_MAX)
        try:
            leftover = msgspec.json.decode(body, type=wire.Listed).info()
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise Permanent(f"not a line of a listing: {str(error)[:200]}") from error
        await self._run(lambda: self._store.sweep(leftover))
        return web.Response()


class _BodyCutError(Exception):
    """A body ended too early, hung, or was abandoned. Never leaves this file."""


class _Incoming:
    """A request's body, read by a thread while the loop receives it. Once."""

    def __init__(
        self, request: web.Request, size_bytes: int, timeout_s: float, *, in_frames: bool
    ) -> None:
        self._content = request.content
        self._loop = asyncio.get_running_loop()
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._in_frames = in_frames

    def __iter__(self) -> Iterator[Buffer]:
        return self._frames() if self._in_frames else self._parts(self._size_bytes)

    def _frames(self) -> Iterator[Buffer]:
        while True:
            length = int.from_bytes(self._exactly(4), "big")
            if length == wire.WHOLE:
                return
            if length > wire.FRAME_BYTES_MAX:
                raise _BodyCutError("the sender abandoned it")
            yield self._exactly(length)

    def _parts(self, size_bytes: int) -> Iterator[Buffer]:
        for begin in range(0, size_bytes, wire.FRAME_BYTES_MAX):
            yield self._exactly(min(wire.FRAME_BYTES_MAX, size_bytes - begin))

    def _exactly(self, length: int) -> bytes:
        async def read() -> bytes:
            async with asyncio.timeout(self._timeout_s):
                return await self._content.readexactly(length)

        try:
            return asyncio.run_coroutine_threadsafe(read(), self._loop).result()
        except (OSError, EOFError, aiohttp.ClientError, web.RequestPayloadError) as error:
            raise _BodyCutError(str(error) or type(error).__name__) from error


async def read_bounded(request: web.Request, bytes_max: int) -> bytes:
    """The whole body of a request. Raises TooLarge (as soon as it is clear)."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > bytes_max:
            raise TooLarge(f"a body of over {bytes_max} bytes")
    return bytes(body)


def check_key_of(request: web.Request, store: Store) -> str:
    """The key in the path. Raises BadKey."""
    key = request.match_info["key"]
    check_key(key, operation="put", where=store.url)
    return key


def _headers(source: Source) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        wire.MODIFIED_HEADER: repr(source.modified_s),
    }


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Permanent(f"size {text[:40]!r}: expected a number of bytes")
    return int(text)


def _file_sender(fd: int) -> Callable[[socket.socket, int, int], None]:
    def send(connection: socket.socket, offset: int, length: int) -> None:
        with open(fd, "rb", buffering=0, closefd=False) as file:
            while length:
                count = connection.sendfile(file, offset, min(length, READ_BYTES))
                if count == 0:
                    raise OSError("the file has become shorter")
                offset, length = offset + count, length - count

    return send


def _memory_sender(view: memoryview) -> Callable[[socket.socket, int, int], None]:
    def send(connection: socket.socket, offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            part = view[offset : min(offset + READ_BYTES, end)]
            connection.sendall(part)
            offset += part.nbytes

    return send


def _store_sender(store: Store, key: str) -> Callable[[socket.socket, int, int], None]:
    """Objects of up to READ_BYTES are sent as they are at one moment."""

    def send(connection: socket.socket, offset: int, length: int) -> None:
        buffer = memoryview(bytearray(min(length, READ_BYTES)))
        while length:
            part = buffer[: min(length, READ_BYTES)]
            store.read_into(key, offset, part)
            connection.sendall(part)
            offset, length = offset + part.nbytes, length - part.nbytes

    return send


def _page(store: Store, prefix: str, after: str) -> wire.Page:
    going = (info for info in store.list(prefix) if info.key > after)
    found = tuple(wire.listed(info) for info in islice(going, wire.PAGE_OBJECTS + 1))
    return wire.Page(found[: wire.PAGE_OBJECTS], is_last=len(found) <= wire.PAGE_OBJECTS)


def _left_over(store: Store, prefix: str) -> wire.Page:
    found = islice(store.leftovers(prefix), wire.LEFTOVERS_MAX)
    return wire.Page(tuple(wire.listed(info) for info in found), is_last=True)

"""A proxy in front of a real S3 server, which misbehaves on demand.

Requests pass byte for byte, so that their signatures hold. Those that a fault counts are numbered
from 0; a test can run once without faults, read `requests`, and then strike each in turn.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any
from urllib.parse import urlsplit

_BODY_BYTES_MAX = 64 << 20
_PATIENCE_S = 120.0


class Action(Enum):
    """What goes wrong."""

    STATUS = auto()
    """The request is not passed on; the answer is an error, S3's own if `code` is given."""
    STATUS_AFTER = auto()
    """It is passed on and done, and the answer is an error: a gateway gave up too early."""
    SLOW = auto()
    """It waits `seconds`, then all goes well."""
    HOLD = auto()
    """It waits until `release`, then all goes well."""
    HANG = auto()
    """It is not passed on, and never answered."""
    RESET = auto()
    """It is not passed on; the connection is reset."""
    LOSE_ANSWER = auto()
    """It is passed on and done; the connection is reset instead of an answer."""
    LAND_LATE = auto()
    """The connection is reset; after `seconds` it is passed on and done all the same."""
    TRUNCATE = auto()
    """It is done; half of the answer's body comes, then the connection ends."""
    LIE_ABOUT_LENGTH = auto()
    """It is done; half of the answer's body comes, and its header says that this is all."""
    TRICKLE = auto()
    """It is done; the answer's body comes byte by byte, `seconds` apart."""
    DAMAGE_REQUEST = auto()
    """One bit of the request's body is flipped on the way."""
    DAMAGE_ANSWER = auto()
    """One bit of the answer's body is flipped on the way."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One misfortune: strikes the requests number `at` to `at + times - 1` among those counted."""

    action: Action
    at: int = 0
    times: int = 1
    method: str = ""
    """Only requests of this method are counted; "": all."""
    contains: str = ""
    """Only requests whose path and query contain this are counted."""
    status: int = 500
    code: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Counted:
    fault: Fault
    seen: int = field(default=0)

    def strikes(self, method: str, target: str) -> bool:
        if self.fault.method not in ("", method) or self.fault.contains not in target:
            return False
        self.seen += 1
        return self.fault.at < self.seen <= self.fault.at + self.fault.times


@dataclass(frozen=True, slots=True)
class _Message:
    """A request or an answer: its first line and headers as they came, and its body."""

    head: bytes
    body: bytes

    @property
    def first_line(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")

    def header(self, name: str) -> str:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode("latin-1")
        return ""


class S3Proxy:
    """Listens on a free loopback port; its loop has a thread of its own. Closed on leaving."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self._faults: list[_Counted] = []
        self._lock = threading.Lock()
        self._late: list[Future[None]] = []
        self.requests: list[tuple[str, str]] = []
        """Method and target of each request so far."""
        self.puts_now = 0
        self.puts_at_once = 0
        """The most PUTs that were made slow, or otherwise bad, together."""

    def __enter__(self) -> S3Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3-proxy", daemon=True)
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def endpoint(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self._port}"

    def set_faults(self, *faults: Fault) -> None:
        """Begin anew: these faults, and nothing counted yet."""
        with self._lock:
            self._faults = [_Counted(fault) for fault in faults]
            self.requests = []
            self.puts_at_once = 0
        self._loop.call_soon_threadsafe(self._released.clear)

    def wait_for_late(self) -> None:
        """Until everything that lands late has landed."""
        for landing in self._late:
            landing.result(_PATIENCE_S)

    def wait_for_requests(self, count: int) -> None:
        """Until so many have come since `set_faults`."""
        end_s = time.monotonic() + _PATIENCE_S
        while len(self.requests) < count:
            assert time.monotonic() < end_s, f"{len(self.requests)} requests came, not {count}"
            time.sleep(0.01)

    def release(self) -> None:
        """Let go on what is held, and all that would be."""
        self._loop.call_soon_threadsafe(self._released.set)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    async def _listen(self) -> None:
        self._released = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader, writer)) is not None:
                if not await self._answer(request, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # the client, the server behind, or the test has gone
        finally:
            writer.close()

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        is_put = method == "PUT"
        self.puts_now += is_put
        self.puts_at_once = max(self.puts_at_once, self.puts_now)
        try:
            yield
        finally:
            self.puts_now -= is_put

    async def _answer(self, request: _Message, writer: asyncio.StreamWriter) -> bool:
        """Answer one request, well or badly. Returns whether the connection goes on."""
        method, target = request.first_line[:2]
        with self._lock:
            self.requests.append((method, target))
            struck = [c.fault for c in self._faults if c.strikes(method, target)]
        fault = struck[0] if struck else None
        action = None if fault is None else fault.action
        if fault is None:
            return await _send(writer, await self._forward(request))
        if action is Action.STATUS:
            return await _send(writer, _failure(fault, method))
        if action is Action.HANG:
            await asyncio.sleep(3_600)
        if action is Action.RESET:
            return _reset(writer)
        if action is Action.LAND_LATE:
            later = self._land(request, fault.seconds)
            self._late.append(asyncio.run_coroutine_threadsafe(later, self._loop))
            return _reset(writer)
        if action is Action.DAMAGE_REQUEST:
            request = _Message(request.head, _flipped(request.body))
        with self._counted(method):
            if action is Action.SLOW:
                await asyncio.sleep(fault.seconds)
            if action is Action.HOLD:
                await self._released.wait()
            answer = await self._forward(request)
        return await _misreport(fault, method, answer, writer)

    async def _land(self, request: _Message, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._forward(request)

    async def _forward(self, request: _Message) -> _Message:
        reader, writer = await asyncio.open_connection(*self._upstream, limit=1 << 20)
        try:
            head = b"\r\n".join(
                line
                for line in request.head.split(b"\r\n")
                if not line.lower().startswith(b"expect:")
            )
            writer.write(head + request.body)
            await writer.drain()
            return await _read_answer(reader, request.first_line[0])
        finally:
            writer.close()


async def _misreport(
    fault: Fault, method: str, answer: _Message, writer: asyncio.StreamWriter
) -> bool:
    """Give a good answer badly."""
    if fault.action is Action.STATUS_AFTER:
        return await _send(writer, _failure(fault, method))
    if fault.action is Action.LOSE_ANSWER:
        return _reset(writer)
    if fault.action is Action.TRUNCATE:
        await _send(writer, _Message(answer.head, answer.body[: len(answer.body) // 2]))
        return False
    if fault.action is Action.LIE_ABOUT_LENGTH:
        return await _send(writer, _shortened(answer))
    if fault.action is Action.TRICKLE:
        await _send(writer, _Message(answer.head, b""))
        for place in range(len(answer.body)):
            await asyncio.sleep(fault.seconds)
            await _send(writer, _Message(b"", answer.body[place : place + 1]))
        return True
    if fault.action is Action.DAMAGE_ANSWER:
        answer = _Message(answer.head, _flipped(answer.body))
    return await _send(writer, answer)


async def _send(writer: asyncio.StreamWriter, message: _Message) -> bool:
    writer.write(message.head + message.body)
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close so that the other side sees a reset, not an orderly end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def _failure(fault: Fault, method: str) -> _Message:
    text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
    body = text if fault.code and method != "HEAD" else b""
    head = f"HTTP/1.1 {fault.status} Injected\r\nContent-Length: {len(body)}\r\n\r\n"
    return _Message(head.encode(), body)


def _shortened(answer: _Message) -> _Message:
    body = answer.body[: len(answer.body) // 2]
    lines = [
        b"Content-Length: %d" % len(body) if line.lower().startswith(b"content-length:") else line
        for line in answer.head.split(b"\r\n")
    ]
    return _Message(b"\r\n".join(lines), body)


def _flipped(body: bytes) -> bytes:
    damaged = bytearray(body)
    if damaged:
        damaged[len(damaged) // 2] ^= 1
    return bytes(damaged)


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> _Message | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    request = _Message(head, b"")
    if request.header("expect"):
        await _send(writer, _Message(b"HTTP/1.1 100 Continue\r\n\r\n", b""))
    return _Message(head, await _read_body(reader, request))


async def _read_answer(reader: asyncio.StreamReader, method: str) -> _Message:
    while True:
        answer = _Message(await reader.readuntil(b"\r\n\r\n"), b"")
        status = int(answer.first_line[1])
        if status >= 200:
            break
    if method == "HEAD" or status in (204, 304):
        return answer
    return _Message(answer.head, await _read_body(reader, answer))


async def _read_body(reader: asyncio.StreamReader, message: _Message) -> bytes:
    """The body as it is on the wire: chunks keep their frames."""
    length = message.header("content-length")
    if length:
        assert int(length) <= _BODY_BYTES_MAX
        return await reader.readexactly(int(length))
    body = b""
    if message.header("transfer-encoding").lower() == "chunked":
        with suppress(asyncio.IncompleteReadError):
            while True:
                line = await reader.readuntil(b"\r\n")
                size_bytes = int(line.split(b";")[0], 16)
                body += line + await reader.readexactly(size_bytes + 2)
                if size_bytes == 0:
                    break
    return body

"""Connections to one HTTP server, kept open and used again; for several threads.

The body of an answer is read straight into the caller's memory. A connection that failed is closed,
never given back. One that the server closed while it lay idle is found out by the next request: if
not a byte of an answer came, a request that may be made twice is made again on a new one.
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from keepstep.storage.store import Buffer

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIECE_BYTES = 1 << 20
"""How much is read before the caller may look at it; and how much before time is looked at."""
IDLE_MAX_S = 30.0
"""A connection that lay idle for longer is not used again; servers keep them longer."""
KEPT_MAX = 8
RATE_BYTES_PER_S_MIN = 1_000_000
"""A body that comes slower than this, after the time-out's grace, counts as hanging."""


class NotConnected(OSError):
    """No connection could be made: the server knows nothing of the request."""


class ConnectionFailed(OSError):
    """The connection broke, hung, or the answer is no HTTP: the server may have done anything."""


class _Arriving(io.BufferedReader):
    """Gives what has arrived, without waiting until all that was asked for is there."""

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        return self.readinto1(buffer)


class _Response(http.client.HTTPResponse):
    """So that the time can be looked at while a body comes byte by byte."""

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None) -> None:
        super().__init__(sock, debuglevel, method)
        buffered: io.BufferedReader = self.fp
        self.fp = _Arriving(buffered.detach())


class Upload:
    """A request whose body is being sent in parts. The headers say where it ends, or the parts."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def send(self, data: Buffer) -> None:
        """Send a part. Raises ConnectionFailed."""
        with _failures():
            self._connection.send(data)

    def settle(self) -> None:
        """Wait for the answer, whatever it is, before giving up. Raises ConnectionFailed."""
        with _failures():
            self._connection.getresponse().read(1)


Sending: TypeAlias = Callable[[Upload], None]
"""Sends a body by parts. What it raises passes through; the connection is closed then."""


class Answer:
    """Status and headers of an answer, whose body is still to be read, once."""

    def __init__(
        self, response: http.client.HTTPResponse, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self.status = response.status
        self.headers = response.headers
        self.size_bytes = response.length
        """Length of the body as the server states it; None: it does not."""
        self._response = response
        self._timeout_s = timeout_s
        self._clock = clock
        self._begun_s = clock()
        self._done = 0

    def read(self, bytes_max: int) -> bytes:
        """The whole body, of at most `bytes_max` bytes. Raises ConnectionFailed."""
        if self.size_bytes is not None:
            if self.size_bytes > bytes_max:
                stated = f"{self.size_bytes} bytes"
                raise ConnectionFailed(f"a body of {stated}, expected at most {bytes_max}")
            data = bytearray(self.size_bytes)
            self.fill(memoryview(data))
            return bytes(data)
        with _failures():
            found = self._response.read(bytes_max + 1)
        if len(found) > bytes_max:
            raise ConnectionFailed(f"a body of over {bytes_max} bytes")
        return found

    def fill(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the body. Raises ConnectionFailed."""
        done = 0
        while done < target.nbytes:
            with _failures():
                count = self._response.readinto(target[done : done + PIECE_BYTES])
            if count == 0:
                ended = f"the body ended after {self._done} bytes"
                raise ConnectionFailed(f"{ended}, {target.nbytes - done} more were expected")
            done += count
            self._done += count
            spent_s = self._clock() - self._begun_s
            if spent_s > self._timeout_s + self._done / RATE_BYTES_PER_S_MIN:
                raise ConnectionFailed(f"only {self._done} bytes came in {spent_s:.1f} s")
        if self._done == 0:
            with _failures():
                self._response.read(1)  # an empty body: so that http.client knows that it is read


class Connections:
    """All connections to `address` ("host:port"). Safe between threads.

    Args:
        address: of the server.
        headers: sent with each request.
        timeout_s: how long a connect, or a silence, may last.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        address: str,
        headers: Mapping[str, str],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit():
            raise ValueError(f"address {address!r} is not HOST:PORT")
        self._host, self._port = host.strip("[]"), int(port)
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []

    def close(self) -> None:
        """Close those that lie idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Buffer | Sending | None = None,
        *,
        may_repeat: bool = False,
    ) -> Iterator[Answer]:
        """Make a request; the answer is to be read inside the `with`.

        A body that was not read to its end costs the connection.

        Raises:
            NotConnected: nothing was sent.
            ConnectionFailed: anything may have happened.
        """
        connection, response = self._answered(method, path, headers or {}, body, may_repeat)
        try:
            yield Answer(response, self._timeout_s, self._clock)
        except ConnectionFailed:
            connection.close()
            raise
        finally:
            if response.will_close or not response.isclosed():
                connection.close()
            elif connection.sock is not None:
                self._give_back(connection)

    def _answered(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Buffer | Sending | None,
        may_repeat: bool,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._take()
        if connection is not None:
            try:
                return connection, self._exchange(connection, method, path, headers, body)
            except ConnectionFailed as error:
                if not may_repeat or isinstance(error.__cause__, TimeoutError):
                    raise
        connection = self._connected()
        return connection, self._exchange(connection, method, path, headers, body)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Buffer | Sending | None,
    ) -> http.client.HTTPResponse:
        """Send a request and read the head of its answer. On an error the connection is closed."""
        try:
            with _failures():
                connection.putrequest(method, path, skip_accept_encoding=True)
                for name, value in (self._headers | dict(headers)).items():
                    connection.putheader(name, value)
                if callable(body):
                    connection.endheaders()
                else:
                    view = memoryview(body or b"")
                    if view.nbytes or method not in ("GET", "HEAD"):
                        connection.putheader("Content-Length", str(view.nbytes))
                    connection.endheaders(view if view.nbytes else None)
            if callable(body):
                body(Upload(connection))
            with _failures():
                return connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _connected(self) -> http.client.HTTPConnection:
        try:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            connection.response_class = _Response
            connection.connect()
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: a host name that cannot be one. Addresses come from others.
            raise NotConnected(_words(error)) from error
        return connection

    def _take(self) -> http.client.HTTPConnection | None:
        """The one used last, if it has not lain too long; the older ones are closed then."""
        now_s = self._clock()
        with self._lock:
            stale = [c for c, since_s in self._idle if now_s - since_s > IDLE_MAX_S]
            self._idle = [each for each in self._idle if now_s - each[1] <= IDLE_MAX_S]
            found = self._idle.pop()[0] if self._idle else None
        for connection in stale:
            connection.close()
        return found

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < KEPT_MAX:
                self._idle.append((connection, self._clock()))
                return
        connection.close()


@contextmanager
def _failures() -> Iterator[None]:
    """What the socket or http.client raises inside becomes ConnectionFailed."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(_words(error)) from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__

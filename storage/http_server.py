"""An HTTP server in a thread of its own, with its own loop: started and ended by any thread.

Who connects and is not let in by the application may hold a bounded number of descriptors, for a
bounded time: the process that serves has others to talk to.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from aiohttp import web
from aiohttp.typedefs import Handler

KEEP_ALIVE_S = 120.0
"""Longer than clients keep a connection that lies idle (`connections.IDLE_MAX_S`)."""
STRANGERS_MAX = 512
"""Connections of which no request was let in yet; what comes beyond is closed at once."""
STRANGER_S = 10.0
"""How long a connection may take until a request of it is let in."""

_SHUTDOWN_S = 2.0
_BACKLOG = 128
_NEW_S = 0.1
"""A connection that is younger may not have its transport yet."""


class HttpServer:
    """Serves `make_app()`, which is called in the server's thread.

    Args:
        make_app: makes the application, where a loop is running.
        bind: address to listen on.
        port: 0 for any that is free.
        name: of the thread.
    """

    def __init__(
        self, make_app: Callable[[], web.Application], bind: str, port: int, name: str
    ) -> None:
        self._make_app = make_app
        self._bind = bind
        self._port = port
        self._name = name
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    def start(self) -> int:
        """Listen; returns the port. Raises OSError, or ValueError for what is no address."""
        listening: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), name=self._name, daemon=True
        )
        self._thread.start()
        return listening.result()

    def close(self, timeout_s: float) -> bool:
        """Close the listening socket and all connections, and join the thread.

        Returns whether it ended in time; it is a daemon thread. May be called twice.
        """
        if self._thread is None:
            return True
        if self._loop is not None and self._ended is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def _serve(self, listening: Future[int]) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app, strangers = self._make_app(), _Strangers()
        app.middlewares.append(strangers.let_in)  # the innermost: after all that may refuse
        runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=_SHUTDOWN_S
        )
        try:
            await runner.setup()
            server = await self._loop.create_server(
                lambda: strangers.come(runner.server),
                self._bind,
                self._port,
                reuse_address=True,
                backlog=_BACKLOG,
            )
        except (OSError, OverflowError, ValueError) as error:
            await runner.cleanup()
            if isinstance(error, OverflowError):
                error = ValueError(f"port {self._port}: {error}")
            listening.set_exception(error)
            return
        watch = self._loop.create_task(strangers.watch())
        listening.set_result(server.sockets[0].getsockname()[1])
        try:
            await self._ended.wait()
        finally:
            watch.cancel()
            server.close()
            await runner.cleanup()


class _Strangers:
    """The connections of which no request was let in yet, and since when each is there."""

    def __init__(self) -> None:
        self._since_s: dict[asyncio.BaseProtocol, float] = {}

    def come(self, make: Callable[[], web.RequestHandler] | None) -> asyncio.BaseProtocol:
        """The protocol for one more connection."""
        if len(self._since_s) >= STRANGERS_MAX:
            self._look()
        if make is None or len(self._since_s) >= STRANGERS_MAX:
            return _TurnedAway()
        protocol = make()
        self._since_s[protocol] = asyncio.get_running_loop().time()
        return protocol

    @web.middleware
    async def let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._since_s.pop(request.protocol, None)
        return await handler(request)

    async def watch(self) -> None:
        """End connections that take too long; until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self._look()

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for protocol, since_s in tuple(self._since_s.items()):
            transport = getattr(protocol, "transport", None)
            if transport is None and now_s - since_s > _NEW_S:
                del self._since_s[protocol]
            elif transport is not None and now_s - since_s > STRANGER_S:
                transport.abort()


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()

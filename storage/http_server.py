"""An HTTP server in a thread of its own, with its own loop: started and ended by any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from aiohttp import web

KEEP_ALIVE_S = 120.0
"""Longer than clients keep a connection that lies idle (`connections.IDLE_MAX_S`)."""
_SHUTDOWN_S = 2.0


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
        runner = web.AppRunner(
            self._make_app(),
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        try:
            await runner.setup()
            site = web.TCPSite(runner, self._bind, self._port, reuse_address=True)
            await site.start()
        except (OSError, OverflowError, ValueError) as error:
            await runner.cleanup()
            if isinstance(error, OverflowError):
                error = ValueError(f"port {self._port}: {error}")
            listening.set_exception(error)
            return
        listening.set_result(runner.addresses[0][1])
        try:
            await self._ended.wait()
        finally:
            await runner.cleanup()

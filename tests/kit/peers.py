"""A store served over HTTP on loopback, and its client: for tests of what talks to peers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from aiohttp import web

from keepstep.storage.http_server import HttpServer
from keepstep.storage.peer import PeerStore
from keepstep.storage.peer_server import StoreHandlers, bearer
from keepstep.storage.store import Store
from keepstep.storage.token import Token

TOKEN = Token("a-token-of-the-test-kit")


@contextmanager
def server_of(
    store: Store, *, timeout_s: float = 20.0, is_writable: bool = True, name: str = "disk"
) -> Iterator[str]:
    """The address at which `store` is served."""
    with ThreadPoolExecutor(16, thread_name_prefix="kit-peer") as threads:

        def app() -> web.Application:
            made = web.Application(middlewares=[bearer(TOKEN)])
            handlers = StoreHandlers(store, name, threads, timeout_s, is_writable=is_writable)
            made.add_routes(handlers.routes())
            return made

        server = HttpServer(app, "127.0.0.1", 0, "kit-peer-loop")
        try:
            yield f"127.0.0.1:{server.start()}"
        finally:
            assert server.close(20.0)


@contextmanager
def serving(store: Store, *, timeout_s: float = 20.0) -> Iterator[PeerStore]:
    """A client of a server of `store`."""
    with server_of(store, timeout_s=timeout_s) as address:
        client = PeerStore(address, "disk", TOKEN, timeout_s)
        try:
            yield client
        finally:
            client.close()

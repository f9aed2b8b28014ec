"""An HTTP server in a thread: what cannot be listened at is said, and not waited for."""

from __future__ import annotations

import threading

import pytest
from aiohttp import web

from keepstep.storage.http_server import HttpServer

WAIT_S = 20.0


@pytest.mark.parametrize(("bind", "port"), [("127.0.0.1", 70_000), ("a\0b", 0)])
def test_an_address_that_cannot_be_is_refused(bind: str, port: int) -> None:
    refused: list[str] = []
    server = HttpServer(web.Application, bind, port, "test-server")

    def start() -> None:
        try:
            server.start()
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert len(refused) == 1
    assert server.close(WAIT_S)

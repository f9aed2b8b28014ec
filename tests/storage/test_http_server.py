"""An HTTP server in a thread: what cannot be listened at is said, and not waited for."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from keepstep.storage.http_server import HttpServer
from keepstep.storage.peer_server import bearer
from keepstep.storage.token import Token

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


TOKEN = Token("a-token-of-this-test")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server that lets in who has the token, and few others."""
    monkeypatch.setattr("keepstep.storage.http_server.STRANGERS_MAX", 8)
    monkeypatch.setattr("keepstep.storage.http_server.STRANGER_S", 1.0)
    server = HttpServer(
        lambda: web.Application(middlewares=[bearer(TOKEN)]), "127.0.0.1", 0, "test-server"
    )
    yield server.start()
    assert server.close(WAIT_S)


def ask(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/nothing", headers={"Authorization": TOKEN.header})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_that_say_nothing_hold_few_connections_and_not_for_long(port: int) -> None:
    with contextlib.ExitStack() as stack:
        known = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        stack.callback(known.close)
        assert ask(known) == 404
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(30)
        ]
        began_s = time.monotonic()
        assert all(is_closed(each) for each in strangers[8:])
        assert time.monotonic() - began_s < 1.0  # at once
        assert ask(known) == 404
        assert all(is_closed(each) for each in strangers[:8])
        newcomer = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        stack.callback(newcomer.close)
        assert ask(newcomer) == 404
        time.sleep(2.5)
        assert ask(known) == 404  # who was let in stays


def test_who_is_refused_again_and_again_is_a_stranger(port: int) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), WAIT_S)) as stranger:
        until_s, is_over = time.monotonic() + WAIT_S, False
        while time.monotonic() < until_s and not is_over:
            is_over = is_refused_for_good(stranger)
            time.sleep(0.1)
        assert is_over


def is_refused_for_good(stranger: socket.socket) -> bool:
    """Ask without a token; whether the connection was closed."""
    try:
        stranger.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        return stranger.recv(4096) == b""
    except (ConnectionResetError, BrokenPipeError):
        return True

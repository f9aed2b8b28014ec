"""The control socket against clients that are hostile, broken or slow; and what a frame may be."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.kit.keepers import WAIT_S, KeeperHost, enter_of, eventually, keeper_host, make_structure

from keepstep.ckpt.control import FRAME_BYTES_MAX, Attach, Leave, Refused, Reply, Request
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.frames import receive_frame, send_frame
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_control import FIRST_FRAME_BYTES_MAX
from keepstep.ckpt.keeper_errors import KeeperGone, Refusal

REQUESTS = msgspec.json.Decoder(Request)
REPLIES = msgspec.json.Decoder(Reply)
ATTACH = Attach(job="demo", rank=0, pid=1, ticks=2)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        for each in (one, other):
            each.settimeout(5)
        yield one, other


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def test_a_message_comes_back_as_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    send_frame(pair[0], ATTACH)
    send_frame(pair[0], Leave(is_finished=True))
    assert receive_frame(pair[1], REQUESTS, 100) == ATTACH
    assert receive_frame(pair[1], REQUESTS, 100) == Leave(is_finished=True)
    pair[0].close()
    assert receive_frame(pair[1], REQUESTS, 100) is None


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_a_frame_that_ends_too_soon_is_a_broken_connection(
    pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    pair[0].sendall(framed(msgspec.json.encode(ATTACH))[:count])
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed after"):
        receive_frame(pair[1], REQUESTS, 100)


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        framed(b"[" * 5_000),
        framed(b"\xff\xfe"),
        framed(b'{"type":"unknown"}'),
        framed(b'{"type":"leave","is_finished":true,"more":1}'),
        framed(b'{"type":"attach","job":"a","rank":1e400,"pid":1,"ticks":1}'),
        (1 << 31).to_bytes(4, "big"),
        (6_001).to_bytes(4, "big") + b"x" * 6_001,
    ],
)
def test_what_is_no_message_is_refused(
    pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    pair[0].sendall(data)
    with pytest.raises(FormatError, match="frame"):
        receive_frame(pair[1], REQUESTS, 6_000)


def test_a_message_too_long_to_be_taken_is_not_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    long = Refused("Refusal", "x" * FRAME_BYTES_MAX)
    with pytest.raises(FormatError, match=f"at most {FRAME_BYTES_MAX} bytes"):
        send_frame(pair[0], long)


def test_no_keeper_is_said_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(KeeperGone, match=f"no answer from the keeper at {tmp_path}/control"):
        KeeperClient(tmp_path, 1.0)


def test_a_keeper_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "control"))
        silent.listen()
        with KeeperClient(tmp_path, 0.2) as client, pytest.raises(KeeperGone, match="timed out"):
            client.take_inventory(1, 1)


@pytest.fixture(scope="module")
def host() -> Iterator[KeeperHost]:
    """A keeper whose socket others can reach: that they may not speak is for it to decide."""
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-") as name,
        keeper_host(Path(name), patience_s=30.0) as made,
    ):
        made.start()
        yield made


def connect(host: KeeperHost) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(WAIT_S)
    try:
        connection.connect(str(host.place.control))
    except OSError:
        connection.close()
        raise
    return connection


def still_serves(host: KeeperHost) -> None:
    client = host.client()
    with contextlib.closing(client):
        client.take_inventory(0, 0)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 4,
        (FIRST_FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        framed(b"nonsense"),
        framed(b"[" * 4_000),
        framed(b'{"type":"attach","job":"demo","rank":"0","pid":1,"ticks":1}'),
    ],
)
def test_a_hostile_frame_is_refused_and_the_connection_closed(
    host: KeeperHost, data: bytes
) -> None:
    told = len(host.events("client_refused"))
    with connect(host) as connection:
        connection.sendall(data)
        reply = receive_frame(connection, REPLIES, FRAME_BYTES_MAX)
        assert isinstance(reply, Refused)
        assert receive_frame(connection, REPLIES, FRAME_BYTES_MAX) is None
    eventually(lambda: len(host.events("client_refused")) == told + 1, "the keeper tells")
    still_serves(host)


@pytest.mark.ranks
def test_a_client_that_stops_in_the_middle_holds_nobody_up(host: KeeperHost) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(connect(host))
            connection.sendall(framed(b"x" * 100)[:50])
        began_s = time.monotonic()
        still_serves(host)
        assert time.monotonic() - began_s < 30


@pytest.mark.ranks
def test_no_number_of_connections_ends_the_keeper(host: KeeperHost) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            with contextlib.suppress(BlockingIOError):  # the queue of those that wait is full
                stack.enter_context(connect(host))
    eventually(lambda: serves(host), "the keeper answers again")


def serves(host: KeeperHost) -> bool:
    try:
        still_serves(host)
    except KeeperGone:
        return False
    return True


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh_size", "words"), [(10**9, "placements that fit"), (2, "plan_digest: expected")]
)
def test_an_enter_with_a_structure_that_cannot_be_is_refused(
    host: KeeperHost, mesh_size: int, words: str
) -> None:
    structure = make_structure(1)
    axes = (msgspec.structs.replace(structure.mesh.axes[0], size=mesh_size),)
    mesh = msgspec.structs.replace(structure.mesh, axes=axes)
    wrong = msgspec.structs.replace(structure, mesh=mesh)
    enter = enter_of(host, structure)
    with contextlib.closing(host.client()) as client, pytest.raises(Refusal, match=words):
        client.enter(msgspec.structs.replace(enter, structure=wrong))
    still_serves(host)


STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(20)
    connection.connect(sys.argv[1])
    try:
        connection.sendall(b"\\0\\0\\0\\2{}")
        print(connection.recv(1))
    except (BrokenPipeError, ConnectionResetError):
        print(b"")
"""


@pytest.mark.ranks
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_answered(host: KeeperHost) -> None:
    for path in (host.directory, Path(host.config.shm_dir), host.place.path, host.place.control):
        os.chmod(path, 0o777)  # as if somebody had opened what is closed
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(host.place.control)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    for path in (host.place.control, host.place.path, Path(host.config.shm_dir)):
        os.chmod(path, 0o700)
    assert done.stdout == "b''\n", done.stderr
    eventually(
        lambda: any("user 65534" in each["reason"] for each in host.events("client_refused")),
        "the keeper tells",
    )
    still_serves(host)

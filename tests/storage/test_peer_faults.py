from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.kit.faulty_store import Action as StoreAction
from tests.kit.faulty_store import Fault as StoreFault
from tests.kit.faulty_store import FaultyStore
from tests.kit.peers import TOKEN, server_of
from tests.kit.s3_proxy import Action, Fault, S3Proxy
from tests.kit.store_suite import CALLS, READS, pattern

from keepstep.storage import errors
from keepstep.storage.errors import (
    AlreadyExists,
    Denied,
    OutcomeUnknown,
    StoreError,
    Transient,
)
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.peer import PeerStore
from keepstep.storage.peer_wire import decode_error, encode_error
from keepstep.storage.store import Store
from keepstep.storage.token import Token

WRITES = ["put", "put_stream", "put_if_absent", "delete", "sweep"]
SIZE_BYTES = (2 << 20) + 77
SHORT_S = 0.4
WAIT_S = 20.0


@contextmanager
def behind_a_proxy(inner: Store, timeout_s: float = WAIT_S) -> Iterator[tuple[S3Proxy, PeerStore]]:
    with server_of(inner) as address, S3Proxy(f"http://{address}") as proxy:
        store = PeerStore(proxy.endpoint.removeprefix("http://"), "disk", TOKEN, timeout_s)
        try:
            yield proxy, store
        finally:
            store.close()


@pytest.fixture
def inner() -> MemoryStore:
    store = MemoryStore()
    store.put("k", pattern(SIZE_BYTES))
    return store


@pytest.mark.parametrize("token", [None, "another-token-altogether"])
@pytest.mark.parametrize("name", CALLS)
def test_nobody_passes_without_the_token(inner: MemoryStore, name: str, token: str | None) -> None:
    with server_of(inner) as address:
        if token is not None:
            store = PeerStore(address, "disk", Token(token), 5.0)
            with pytest.raises(Denied, match="token"):
                CALLS[name](store, "k")
            store.close()
            with pytest.raises(Denied):
                list(store.list(""))
            store.close()
        else:
            connection = http.client.HTTPConnection(address, timeout=5)
            for method, path in (("GET", "/v1/disk/k"), ("PUT", "/v1/disk/k"), ("GET", "/nowhere")):
                connection.request(method, path)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 401
            connection.close()
    assert inner.get("k", SIZE_BYTES) == pattern(SIZE_BYTES)


def test_a_store_that_is_served_for_reading_cannot_be_changed(inner: MemoryStore) -> None:
    with server_of(inner, is_writable=False) as address:
        store = PeerStore(address, "disk", TOKEN, WAIT_S)
        for name in WRITES:
            with pytest.raises(Denied, match="reading only"):
                CALLS[name](store, "other")
        assert store.get("k", SIZE_BYTES) == pattern(SIZE_BYTES)
        assert [info.key for info in store.list("")] == ["k"]
        store.close()


KINDS = [
    errors.Transient,
    errors.Throttled,
    errors.OutcomeUnknown,
    errors.Permanent,
    errors.NotFound,
    errors.AlreadyExists,
    errors.Truncated,
    errors.TooLarge,
    errors.BadKey,
    errors.NoSpace,
    errors.Denied,
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_crosses_the_wire(kind: type[StoreError]) -> None:
    inner = FaultyStore(MemoryStore(), StoreFault(StoreAction.FAIL, error=kind, errno=28))
    with server_of(inner) as address:
        store = PeerStore(address, "disk", TOKEN, WAIT_S)
        with pytest.raises(kind) as caught:
            store.put("a/k", b"x")
        assert type(caught.value) is kind
        assert (caught.value.operation, caught.value.key) == ("put", "a/k")
        assert caught.value.where == store.url
        assert caught.value.errno == 28
        assert "injected" in str(caught.value)
        store.close()


def test_an_error_of_a_kind_of_its_own_is_told_as_the_nearest_known() -> None:
    class Odd(errors.NoSpace):
        pass

    status, name, body = encode_error(Odd("full"))
    assert decode_error(status, name, body, is_read=True)[0] is errors.NoSpace


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"error":1}', b"\xff" * 9])
def test_an_answer_that_is_not_ours_is_told_by_its_status(body: bytes) -> None:
    assert decode_error(500, None, body, is_read=True)[0] is Transient
    assert decode_error(500, None, body, is_read=False)[0] is OutcomeUnknown
    assert decode_error(404, "NotFound", body, is_read=True)[0] is errors.NotFound
    assert decode_error(404, "Exception", body, is_read=True)[0] is errors.Permanent


def test_nobody_there_is_transient_for_all() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        store = PeerStore(address, "disk", TOKEN, SHORT_S)
        for name, call in CALLS.items():
            with pytest.raises(Transient) as caught:
                call(store, "k")
            assert caught.value.operation == name
            assert address in str(caught.value)


READ_FAULTS = [
    Fault(Action.RESET, times=2),
    Fault(Action.LOSE_ANSWER, times=2),
    Fault(Action.TRUNCATE),
    Fault(Action.LIE_ABOUT_LENGTH),
    Fault(Action.STATUS, status=502),
    Fault(Action.STATUS, status=301),
    Fault(Action.HANG, times=2),
]


@pytest.mark.parametrize("fault", READ_FAULTS, ids=lambda fault: f"{fault.action.name}")
@pytest.mark.parametrize("name", ["get_range", "read_into"])
def test_a_read_that_goes_wrong_is_told_and_the_next_is_right(
    inner: MemoryStore, name: str, fault: Fault
) -> None:
    timeout_s = SHORT_S if fault.action is Action.HANG else WAIT_S
    with behind_a_proxy(inner, timeout_s) as (proxy, store):
        target = memoryview(bytearray(SIZE_BYTES - 100))
        reads: dict[str, Callable[[], object]] = {
            "get_range": lambda: store.get_range("k", 100, SIZE_BYTES - 100),
            "read_into": lambda: store.read_into("k", 100, target),
        }
        proxy.set_faults(fault)
        begun_s = time.monotonic()
        with pytest.raises(StoreError) as caught:
            reads[name]()
        assert time.monotonic() - begun_s < WAIT_S / 2
        assert isinstance(caught.value, Transient) or fault.status == 301
        assert (caught.value.operation, caught.value.key) == (name, "k")
        proxy.set_faults()
        if fault.action is Action.HANG:
            return  # on a busy machine the good answer might come too late as well
        assert (reads[name]() or target) == pattern(SIZE_BYTES)[100:]


def test_a_body_that_comes_too_slowly_counts_as_hanging(inner: MemoryStore) -> None:
    inner.put("small", bytes(4_000))
    with behind_a_proxy(inner, 1.0) as (proxy, store):
        proxy.set_faults(Fault(Action.TRICKLE, seconds=0.01))
        begun_s = time.monotonic()
        with pytest.raises(Transient, match=r"only \d+ bytes came"):
            store.get("small", 5_000)
        assert time.monotonic() - begun_s < 20.0


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "action", [Action.RESET, Action.LOSE_ANSWER, Action.HANG], ids=lambda action: action.name
)
def test_the_outcome_of_a_write_that_broke_off_is_unknown(
    inner: MemoryStore, name: str, action: Action
) -> None:
    with behind_a_proxy(inner, SHORT_S if action is Action.HANG else WAIT_S) as (proxy, store):
        proxy.set_faults(Fault(action))
        with pytest.raises(OutcomeUnknown, match="read the key"):
            CALLS[name](store, "new")
        done = action is Action.LOSE_ANSWER and name.startswith("put")
        assert ("new" in {info.key for info in inner.list("")}) == done


def test_a_lost_answer_of_put_if_absent_is_not_asked_for_again(inner: MemoryStore) -> None:
    with behind_a_proxy(inner, WAIT_S) as (proxy, store):
        store.stat("k")  # leaves a connection that could be used again
        proxy.set_faults(Fault(Action.LOSE_ANSWER))
        with pytest.raises(OutcomeUnknown):
            store.put_if_absent("log/1", b"mine")
        assert len(proxy.requests) == 1
        with pytest.raises(AlreadyExists):
            store.put_if_absent("log/1", b"mine")


def test_a_read_on_a_connection_that_the_server_has_closed_is_made_again(
    tmp_path: Path,
) -> None:
    inner = FileStore(tmp_path)
    inner.put("k", b"hello")
    with server_of(inner) as first:
        store = PeerStore(first, "disk", TOKEN, WAIT_S)
        assert store.get("k", 5) == b"hello"
        kept = store._connections._idle
        assert len(kept) == 1
        kept[0][0].sock.shutdown(socket.SHUT_RDWR)
        assert store.get("k", 5) == b"hello"
        assert len(store._connections._idle) == 1
        store.close()


def test_connections_are_used_again(inner: MemoryStore) -> None:
    with server_of(inner) as address:
        store = PeerStore(address, "disk", TOKEN, WAIT_S)
        store.stat("k")
        ours = store._connections._idle[0][0].sock.getsockname()
        target = memoryview(bytearray(1_000))
        for _ in range(5):
            store.read_into("k", 3, target)
            store.stat("k")
            list(store.list(""))
            store.put("other", b"x")
            store.delete("other")
            with pytest.raises(errors.NotFound):
                store.get_range("none", 0, 1)
            (idle,) = store._connections._idle
            assert idle[0].sock.getsockname() == ours
        store.close()


def test_a_body_cut_on_its_way_there_writes_nothing(tmp_path: Path) -> None:
    inner = FileStore(tmp_path)
    with server_of(inner, timeout_s=2.0) as address:
        for head in ("Content-Length: 1000\r\n\r\nabc", "Content-Length: 10\r\n\r\n"):
            host, port = address.split(":")
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                text = f"PUT /v1/disk/a/k HTTP/1.1\r\nHost: x\r\nAuthorization: {TOKEN.header}\r\n"
                raw.sendall((text + head).encode())
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(1_000):
                    pass
        end_s = time.monotonic() + 10
        while list(inner.leftovers("")) and time.monotonic() < end_s:
            time.sleep(0.02)
        assert list(inner.list("")) == []
        assert list(inner.leftovers("")) == []


@pytest.mark.parametrize("size", ["", "-1", "x", "9" * 30])
def test_a_size_that_is_none_is_refused(inner: MemoryStore, size: str) -> None:
    with server_of(inner) as address:
        connection = http.client.HTTPConnection(address, timeout=5)
        headers = {"Authorization": TOKEN.header, "Transfer-Encoding": "chunked"}
        connection.request("PUT", f"/v1/disk/a?stream={size}", b"0\r\n\r\n", headers)
        answer = connection.getresponse()
        assert answer.status == 422
        assert b"number of bytes" in answer.read()
        connection.close()


@pytest.mark.parametrize(
    "wanted", ["bytes=5-2", "bytes=-5", "bytes=3-", "lines=1-2", "bytes=0-1,3-4"]
)
def test_another_kind_of_range_is_refused(inner: MemoryStore, wanted: str) -> None:
    with server_of(inner) as address:
        connection = http.client.HTTPConnection(address, timeout=5)
        connection.request(
            "GET", "/v1/disk/k", headers={"Authorization": TOKEN.header, "Range": wanted}
        )
        answer = connection.getresponse()
        assert answer.status == 422
        answer.read()
        connection.close()


@pytest.mark.parametrize("name", READS)
def test_names_above_the_store_are_no_keys(inner: MemoryStore, name: str) -> None:
    with server_of(inner) as address:
        connection = http.client.HTTPConnection(address, timeout=5)
        for path in ("/v1/disk/../../etc/passwd", "/v1/disk/%2e%2e/x", "/v1/disk/a%2f..%2fb"):
            connection.request("GET", path, headers={"Authorization": TOKEN.header})
            answer = connection.getresponse()
            answer.read()
            assert answer.status in (400, 404)
        connection.close()


def test_a_reader_that_stops_reading_holds_up_nobody(tmp_path: Path) -> None:
    inner = FileStore(tmp_path)
    inner.put("big", pattern(16 << 20))
    with server_of(inner, timeout_s=0.5) as address:
        host, port = address.split(":")
        stuck = [socket.create_connection((host, int(port)), timeout=5) for _ in range(20)]
        for raw in stuck:
            text = f"GET /v1/disk/big HTTP/1.1\r\nHost: x\r\nAuthorization: {TOKEN.header}\r\n\r\n"
            raw.sendall(text.encode())
        store = PeerStore(address, "disk", TOKEN, 10.0)
        assert store.get("big", 16 << 20) == pattern(16 << 20)
        store.close()
        for raw in stuck:
            raw.close()


def test_a_reader_that_goes_before_its_answer_leaves_no_traceback(
    inner: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    is_asked, goes_on = threading.Event(), threading.Event()

    class Slow(FaultyStore):
        def begin(self, operation: str, key: str) -> None:
            is_asked.set()
            assert goes_on.wait(WAIT_S)

    with server_of(Slow(inner)) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as connection:
            text = f"GET /v1/disk/k HTTP/1.1\r\nHost: x\r\nAuthorization: {TOKEN.header}\r\n\r\n"
            connection.sendall(text.encode())
            assert is_asked.wait(WAIT_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.2)  # the server's loop hears of it
        goes_on.set()
        store = PeerStore(address, "disk", TOKEN, WAIT_S)
        assert store.get("k", SIZE_BYTES) == pattern(SIZE_BYTES)
        store.close()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


def test_an_object_that_shrinks_while_it_is_sent_is_a_cut_body(tmp_path: Path) -> None:
    inner = FileStore(tmp_path)
    inner.put("k", pattern(32 << 20))
    with server_of(inner) as address:
        store = PeerStore(address, "disk", TOKEN, WAIT_S)
        target = memoryview(bytearray(1 << 20))

        def read() -> None:
            with store.reading("k", 0, 32 << 20) as body:
                body.fill(target)
                os.truncate(tmp_path / "k", 1 << 20)
                for _ in range(31):
                    body.fill(target)

        with pytest.raises(Transient, match="ended after"):
            read()
        store.close()

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.kit.keepers import JOB, make_structure
from tests.kit.sides import TOKEN_OF_KIT, Side, no_threads_stay, side

from keepstep.ckpt.errors import NoSuchState
from keepstep.ckpt.keeper_errors import KeeperGone, Refusal, Stale
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import State, decode_description
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.plane_messages import OFFER_BYTES_MAX
from keepstep.ckpt.tiers import Tier
from keepstep.storage.errors import Denied, NotFound
from keepstep.storage.peer import PeerStore
from keepstep.storage.token import Token

STRUCTURE = make_structure(1, rank_bytes=1 << 20)

ROUTES = [
    ("GET", "/v1/inventory"),
    ("POST", "/v1/inventory"),
    ("GET", "/v1/describe/1/1"),
    ("GET", f"/v1/structure/{STRUCTURE.digest}"),
    ("POST", "/v1/offer"),
    ("GET", "/v1/status"),
    ("GET", f"/v1/memory/{image_key(State(1, 1), 0)}"),
    ("HEAD", f"/v1/memory/{image_key(State(1, 1), 0)}"),
    ("GET", "/v1/memory?list="),
    ("GET", "/v1/disk/k"),
    ("PUT", "/v1/disk/k"),
    ("DELETE", "/v1/disk/k"),
    ("GET", "/"),
    ("GET", "/v2/none"),
]


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Side]:
    with no_threads_stay(), side(tmp_path, "h0") as made:
        made.enter(STRUCTURE, [made.here], rank=0)
        made.seal(1)
        yield made


@pytest.fixture
def client(one: Side) -> Iterator[PlaneClient]:
    made = one.client()
    yield made
    made.close()


def ask(one: Side, method: str, path: str, body: bytes = b"", token: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(one.address, timeout=20)
    connection.request(method, path, body, {"Authorization": token} if token else {})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_token(one: Side, method: str, path: str) -> None:
    right = TOKEN_OF_KIT.header
    for token in ("", "Bearer", "Bearer wrong-token-wrong-token", right.lower(), right[:-1]):
        assert ask(one, method, path, token=token)[0] == 401
    assert ask(one, method, path, token=right)[0] != 401


def test_an_inventory_is_what_the_core_has(one: Side, client: PlaneClient) -> None:
    found = client.inventory()
    assert (found.host, found.address, found.generation) == ("h0", one.address, 1)
    (copy,) = found.copies
    assert (copy.state, copy.tier, copy.plan_digest) == (State(1, 1), Tier.MEMORY, STRUCTURE.digest)


def test_a_promise_is_kept(one: Side, client: PlaneClient) -> None:
    assert client.take_inventory(3, 7).generation == 3
    with pytest.raises(Stale, match="generation 2") as caught:
        client.take_inventory(2, 7)
    assert (caught.value.generation, caught.value.term) == (3, 7)
    assert client.inventory().term == 7


def test_a_state_is_described(client: PlaneClient) -> None:
    found = decode_description(client.describe(State(1, 1)), "description")
    assert (found.job, found.state, found.values) == (JOB, State(1, 1), {"cursor": 1})
    with pytest.raises(NoSuchState, match="g000001/s000000000002"):
        client.describe(State(1, 2))


def test_a_structure_is_given_and_checked(client: PlaneClient) -> None:
    assert client.structure(STRUCTURE.digest) == STRUCTURE
    for digest in ("0" * 32, "x", "..%2f..%2fetc"):
        with pytest.raises(Refusal):
            client.structure(digest)


def test_the_status_is_for_people(one: Side, client: PlaneClient) -> None:
    status = client.status()
    assert (status["host"], status["address"]) == ("h0", one.address)
    assert TOKEN_OF_KIT.text not in msgspec.json.encode(status).decode()


def test_images_are_read_from_memory_and_disk_and_never_written(one: Side, tmp_path: Path) -> None:
    key = image_key(State(1, 1), 0)
    shelved = one.shelf.find(State(1, 1), 0)
    assert shelved is not None
    memory = PeerStore(one.address, "memory", TOKEN_OF_KIT, 20.0)
    assert memory.get(key, 1 << 24) == shelved.view
    assert memory.get_range(key, 4_096, 100) == shelved.view[4_096:4_196]
    assert memory.stat(key).size_bytes == len(shelved.view)
    assert [info.key for info in memory.list("states/")] == [key]
    with pytest.raises(NotFound):
        memory.get(image_key(State(1, 2), 0), 1)
    disk = PeerStore(one.address, "disk", TOKEN_OF_KIT, 20.0)
    (tmp_path / "disk-h0" / "k").write_bytes(b"hello")
    assert disk.get("k", 5) == b"hello"
    for store in (memory, disk):
        with pytest.raises(Denied):
            store.put("k", b"x")
        with pytest.raises(Denied):
            store.delete("k")
        store.close()
    assert (tmp_path / "disk-h0" / "k").read_bytes() == b"hello"


@pytest.mark.parametrize("path", ["/v1/inventory", "/v1/offer"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"generation":"1","term":1}', b"\xff\xfe", b"[" * 4_000, b'{"a":1}'],
)
def test_a_body_that_makes_no_sense_is_refused(one: Side, path: str, body: bytes) -> None:
    status, data = ask(one, "POST", path, body, TOKEN_OF_KIT.header)
    assert status == 422
    assert b"not a request of ours" in data


def test_a_body_beyond_its_bound_is_not_read(one: Side) -> None:
    status, data = ask(one, "POST", "/v1/inventory", b" " * 100_000, TOKEN_OF_KIT.header)
    assert (status, b"over 4096" in data) == (422, True)
    body = b" " * (OFFER_BYTES_MAX + 1)
    assert ask(one, "POST", "/v1/offer", body, TOKEN_OF_KIT.header)[0] == 422


@pytest.mark.parametrize(
    "path", ["/v1/describe/x/1", "/v1/describe/1/-1", f"/v1/describe/1/{10**12}"]
)
def test_a_number_that_cannot_be_is_refused(one: Side, path: str) -> None:
    assert ask(one, "GET", path, token=TOKEN_OF_KIT.header)[0] == 422


def test_rubbish_on_the_socket_ends_that_connection_alone(one: Side, client: PlaneClient) -> None:
    host, port = one.address.split(":")
    for rubbish in (b"\x00" * 4_096, b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000):
        with socket.create_connection((host, int(port)), timeout=20) as raw:
            try:
                raw.sendall(rubbish + b"\r\n\r\n")
                while raw.recv(4_096):
                    pass
            except ConnectionError:
                pass
    assert client.inventory().host == "h0"


def test_nobody_there_and_a_wrong_token_are_told_apart(one: Side) -> None:
    wrong = PlaneClient(one.address, Token("wrong-token-wrong-token"), 5.0)
    with pytest.raises(Refusal, match="token"):
        wrong.inventory()
    wrong.close()
    address = one.address
    one.plane.close()
    gone = PlaneClient(address, TOKEN_OF_KIT, 5.0)
    with pytest.raises(KeeperGone, match=address):
        gone.inventory()
    gone.close()


def test_a_taken_port_is_an_error_of_the_system(one: Side, tmp_path: Path) -> None:
    port = int(one.address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"), side(tmp_path / "x", "h1", port=port):
        pass


def test_nothing_of_it_imports_torch() -> None:
    code = (
        "import sys, keepstep.ckpt.data_plane, keepstep.ckpt.replicator, keepstep.ckpt.host_hints;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.kit.keepers import eventually, make_structure
from tests.kit.s3_proxy import Action, Fault, S3Proxy
from tests.kit.sides import PATIENCE_S, TOKEN_OF_KIT, Side, no_threads_stay, side

from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_errors import Refusal, Stale
from keepstep.ckpt.manifest import State
from keepstep.ckpt.plane_messages import Offer, PullFailed
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.structure import Structure

STRUCTURE = make_structure(2, rank_bytes=(2 << 20) + 40_960)


@contextlib.contextmanager
def two_sides(tmp_path: Path, **changes: float) -> Iterator[tuple[Side, Side]]:
    with (
        no_threads_stay(),
        side(tmp_path, "h0", **changes) as a,  # type: ignore[arg-type]
        side(tmp_path, "h1", **changes) as b,  # type: ignore[arg-type]
    ):
        enter_both(a, b)
        yield a, b


def enter_both(a: Side, b: Side, structure: Structure = STRUCTURE, generation: int = 1) -> None:
    for rank, one in enumerate((a, b)):
        one.enter(structure, [a.here, b.here], rank=rank, generation=generation, term=generation)


@contextlib.contextmanager
def behind_a_proxy(tmp_path: Path) -> Iterator[tuple[Side, Side, S3Proxy]]:
    """h1 pulls what h0 offers through a proxy that may do anything to it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_threads_stay())
        proxies = []

        def pulled_from(address: str) -> str:
            proxies.append(stack.enter_context(S3Proxy(f"http://{address}")))
            return proxies[0].endpoint.removeprefix("http://")

        a = stack.enter_context(side(tmp_path, "h0", pulled_from=pulled_from))
        b = stack.enter_context(side(tmp_path, "h1"))
        enter_both(a, b)
        yield a, b, proxies[0]


def offer_of(a: Side, state: State, *, agreed_acked: int = -1, **changes: object) -> Offer:
    shelved = a.shelf.find(state, 0)
    assert shelved is not None
    offer = Offer(
        job=a.config.job,
        to_host="h1",
        from_host="h0",
        address=a.address,
        generation=state.generation,
        term=1,
        state=state,
        record=shelved.record,
        plan_digest=shelved.structure.digest,
        values=msgspec.Raw(b'{"cursor":%d}' % state.step),
        agreed_acked=agreed_acked,
    )
    return msgspec.structs.replace(offer, **changes)


def test_each_sealed_image_is_copied_to_the_peer_and_acked(tmp_path: Path) -> None:
    with two_sides(tmp_path) as (a, b):
        state = a.seal(1)
        b.seal(1)
        b.wait_for(state, 0)
        a.wait_for(state, 1)
        a.wait_acked(1)
        b.wait_acked(1)
        copied = b.shelf.find(state, 0)
        assert copied is not None
        assert not copied.is_own
        assert copied.record == a.shelf.find(state, 0).record  # type: ignore[union-attr]
        assert b.memory.pool.slots[copied.slot].status is SlotStatus.SEALED
        assert a.told("unprotected") == b.told("wrong_bytes") == []


def test_many_steps_need_no_more_slots_than_three(tmp_path: Path) -> None:
    with two_sides(tmp_path) as (a, b):
        count = len(b.memory.pool.slots)
        for step in range(1, 15):
            state = a.seal(step)
            a.wait_acked(step)
            b.wait_for(state, 0)
            a.agree(step)
        assert len(b.memory.pool.slots) == count
        kept = [image.state.step for image in b.shelf.all() if image.rank == 0]
        assert kept == [12, 13, 14]


def test_an_image_that_is_there_already_is_not_pulled_again(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        state = a.seal(1)
        a.wait_acked(1)
        pulls = len(proxy.requests)
        client = b.client()
        again = offer_of(a, state, address=proxy.endpoint.removeprefix("http://"))
        assert client.offer(again) == client.offer(again)
        client.close()
        assert len(proxy.requests) == pulls


def test_a_wrong_chunk_is_told_and_pulled_again(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(Action.DAMAGE_ANSWER, contains="/v1/memory/"))
        state = a.seal(1)
        b.wait_for(state, 0)
        a.wait_acked(1)
        (told,) = b.told("wrong_bytes")
        shelved = a.shelf.find(state, 0)
        assert shelved is not None
        middle = shelved.record.size_bytes // 2
        assert told["offset"] <= middle < told["offset"] + told["size_bytes"]
        assert (told["tensors"], told["rank"], told["tier"]) == (["model/w"], 0, "memory")
        assert (told["host"], told["generation"], told["step"]) == ("h0", 1, 1)
        assert len(proxy.requests) == 2, "only the chunk came again"


def test_bytes_that_stay_wrong_are_never_shelved(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(Action.DAMAGE_ANSWER, contains="/v1/memory/", times=10_000))
        state = a.seal(1)
        b.wait_told("wrong_bytes", 6)
        client = b.client()
        address = proxy.endpoint.removeprefix("http://")
        with pytest.raises(PullFailed, match="wrong bytes at offset"):
            client.offer(offer_of(a, state, address=address))
        client.close()
        assert b.shelf.find(state, 0) is None
        assert a.seat.acked == -1
        proxy.set_faults()
        b.wait_for(state, 0)
        a.wait_acked(1)


def test_a_header_with_wrong_bytes_is_never_shelved(tmp_path: Path) -> None:
    with two_sides(tmp_path) as (a, b):
        a.replicator.close(0.0)  # type: ignore[union-attr]
        state = a.seal(1)
        offer = offer_of(a, state)
        a.slot(1).image[100] ^= 1
        client = b.client()
        with pytest.raises(PullFailed, match="header"):
            client.offer(offer)
        client.close()
        assert b.told("wrong_bytes")[0]["offset"] == 0
        assert b.shelf.all() == ()


@pytest.mark.parametrize(
    "action",
    [
        Action.RESET,
        Action.TRUNCATE,
        Action.LOSE_ANSWER,
        Action.LIE_ABOUT_LENGTH,
        pytest.param(Action.HANG, marks=pytest.mark.slow),
    ],
    ids=lambda action: action.name,
)
def test_a_pull_that_breaks_off_is_made_again(tmp_path: Path, action: Action) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(action, contains="/v1/memory/", times=2))
        state = a.seal(1)
        b.wait_for(state, 0)
        a.wait_acked(1)
        assert not [slot for slot in b.memory.pool.slots if slot.status is SlotStatus.FILLING]


@pytest.mark.slow
def test_a_long_pull_is_no_silence(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(Action.SLOW, contains="/v1/memory/", seconds=PATIENCE_S * 0.6))
        client = b.client(timeout_s=PATIENCE_S / 2)
        a.replicator.close(0.0)  # type: ignore[union-attr]
        state = a.seal(1)
        client.offer(offer_of(a, state, address=proxy.endpoint.removeprefix("http://")))
        client.close()
        assert b.has(state, 0)


def test_a_slot_that_is_used_again_during_a_pull_is_passed_over(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(Action.HOLD, contains="/v1/memory/"))
        first = a.seal(1, position=0)
        proxy.wait_for_requests(1)
        second = a.seal(2, position=0)  # breaks the rule of slots: nobody has the first
        proxy.release()
        b.wait_for(second, 0)
        a.wait_acked(2)
        assert b.shelf.find(first, 0) is None or b.has(first, 0)


def test_an_older_generations_offer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with two_sides(tmp_path) as (a, b):
        state = a.seal(1)
        a.wait_acked(1)
        b.answers.take_inventory(2, 2)
        before = {image.slot: bytes(image.view) for image in b.shelf.all()}
        late = a.seal(2)
        a.wait_told("superseded")
        client = b.client()
        with pytest.raises(Stale, match="generation 2") as caught:
            client.offer(offer_of(a, late))
        assert (caught.value.generation, caught.value.term) == (2, 2)
        with pytest.raises(Stale):
            client.offer(offer_of(a, state, term=1, generation=1))
        client.close()
        assert {image.slot: bytes(image.view) for image in b.shelf.all()} == before
        assert a.seat.acked == 1
        assert raw_status(b, "POST", "/v1/offer", offer_of(a, late)) == 409


def test_a_newer_generation_that_comes_during_a_pull_has_the_last_word(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(Action.HOLD, contains="/v1/memory/"))
        state = a.seal(1)
        proxy.wait_for_requests(1)
        b.answers.take_inventory(2, 2)
        proxy.release()
        a.wait_told("superseded")
        assert b.shelf.find(state, 0) is None
        assert not [slot for slot in b.memory.pool.slots if slot.status is SlotStatus.FILLING]


def test_a_new_generation_goes_on_with_new_images(tmp_path: Path) -> None:
    with two_sides(tmp_path) as (a, b):
        old = a.seal(1)
        b.seal(1)
        a.wait_acked(1)
        b.wait_acked(1)
        for one in (a, b):
            one.answers.take_inventory(2, 2)
        for rank, one in enumerate((a, b)):
            one.enter(STRUCTURE, [a.here, b.here], rank=rank, generation=2, term=2, base=old)
        assert b.has(old, 0)
        new = a.seal(2, position=0)
        b.wait_for(new, 0)
        a.wait_acked(2)
        assert new.generation == 2


def test_a_peer_that_is_gone_stops_nothing_and_catches_up(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0", patience_s=0.5) as a:
        with side(tmp_path, "h1", patience_s=0.5) as b:
            enter_both(a, b)
            a.seal(1)
            a.wait_acked(1)
            address, port = b.here, int(b.address.rpartition(":")[2])
        a.seal(2)
        a.wait_told("unprotected")
        a.wait_acked(2)
        for step in (3, 4, 5, 6):
            a.seal(step)
            a.wait_acked(step)
        assert [each["peer"] for each in a.told("unprotected")] == ["h1"]
        with side(tmp_path / "new", "h1", patience_s=0.5, port=port) as b:
            assert b.here == address
            b.enter(STRUCTURE, [a.here, b.here], rank=1)
            b.wait_for(State(1, 6), 0)
            a.wait_told("protected")
            assert [image.state.step for image in b.shelf.all()] == [6], "the newest alone"
            state = a.seal(7)
            b.wait_for(state, 0)
            a.wait_acked(7)


def test_a_peer_that_forgot_everything_is_told_the_newest_again(tmp_path: Path) -> None:
    structure, hosts = make_structure(3, rank_bytes=100_000), (0, 0, 1)

    def enter(b: Side) -> None:
        b.enter(structure, [a.here, b.here], rank=2, hosts=hosts)

    with no_threads_stay(), side(tmp_path, "h0") as a:
        with side(tmp_path, "h1") as b:
            for rank in (0, 1):
                a.enter(structure, [a.here, b.here], rank=rank, hosts=hosts)
            enter(b)
            for rank in (0, 1):
                state = a.seal(1, rank=rank)
                b.wait_for(state, rank)
            port = int(b.address.rpartition(":")[2])
        with side(tmp_path / "new", "h1", port=port) as b:
            enter(b)
            later = a.seal(2, rank=0)
            b.wait_for(later, 0)
            b.wait_for(state, 1)
            assert a.told("unprotected") == []


def test_a_peer_that_moved_is_found_by_the_hint(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0") as a:
        with side(tmp_path, "h1") as b:
            enter_both(a, b)
            a.seal(1)
            a.wait_acked(1)
            before = b.address
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", int(before.rpartition(":")[2])))
            with side(tmp_path / "new", "h1") as b:
                assert b.address != before
                b.enter(STRUCTURE, [a.here, b.here], rank=1)
                a.moved["h1"] = b.address
                state = a.seal(2)
                b.wait_for(state, 0)
                a.wait_acked(2)


def test_offers_wait_until_the_peer_has_entered(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0") as a, side(tmp_path, "h1") as b:
        a.enter(STRUCTURE, [a.here, b.here], rank=0)
        state = a.seal(1)
        eventually(
            lambda: bool(a.replicator.status()["peers"][0]["failures"]),  # type: ignore
            "an offer was refused",
        )
        assert a.seat.acked == -1
        b.enter(STRUCTURE, [a.here, b.here], rank=1)
        b.wait_for(state, 0)
        a.wait_acked(1)


def test_a_peer_without_a_data_plane_is_told_and_stops_nothing(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0", patience_s=0.3) as a:
        a.enter(STRUCTURE, [a.here, HostAddress("h1", "", "")], rank=0)
        a.seal(1)
        a.wait_told("unprotected")
        a.wait_acked(1)


def test_without_peers_own_memory_is_all_that_acks(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0", peers=0) as a:
        a.enter(make_structure(1), [a.here], rank=0)
        a.seal(1)
        a.wait_acked(1)
        assert a.told("unprotected") == []


def test_too_few_hosts_for_the_copies_wanted_are_told(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0", peers=2) as a:
        a.enter(make_structure(1), [a.here], rank=0)
        a.seal(1)
        a.wait_acked(1)
        assert len(a.told("unprotected")) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "another"},
        {"to_host": "h7"},
        {"address": "nonsense"},
        {"generation": 0},
    ],
    ids=str,
)
def test_an_offer_that_is_not_for_us_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with two_sides(tmp_path) as (a, b):
        a.replicator.close(0.0)  # type: ignore[union-attr]
        state = a.seal(1)
        client = b.client()
        with pytest.raises((Refusal, Stale)):
            client.offer(offer_of(a, state, **changes))
        client.close()
        assert b.shelf.all() == ()


def test_an_image_of_another_state_than_offered_is_refused(tmp_path: Path) -> None:
    with two_sides(tmp_path) as (a, b):
        a.replicator.close(0.0)  # type: ignore[union-attr]
        first, second = a.seal(1), a.seal(2)
        client = b.client()
        with pytest.raises(PullFailed):
            client.offer(offer_of(a, first, record=offer_of(a, second).record))
        client.close()
        assert b.shelf.all() == ()


def test_offers_of_one_rank_wait_for_each_other(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        a.replicator.close(0.0)  # type: ignore[union-attr]
        state = a.seal(1)
        proxy.set_faults(Fault(Action.HOLD, contains="/v1/memory/"))
        offer = offer_of(a, state, address=proxy.endpoint.removeprefix("http://"))
        threads = [threading.Thread(target=b.receiver.receive, args=(offer,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        proxy.wait_for_requests(1)
        proxy.release()
        for thread in threads:
            thread.join(20.0)
        assert len(proxy.requests) == 1
        assert b.has(state, 0)
        assert b.memory.pool.slots[b.shelf.all()[0].slot].status is SlotStatus.SEALED


def raw_status(one: Side, method: str, path: str, offer: Offer) -> int:
    connection = http.client.HTTPConnection(one.address, timeout=20)
    headers = {"Authorization": TOKEN_OF_KIT.header}
    connection.request(method, path, msgspec.json.encode(offer), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_closing_waits_for_what_is_owed(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (a, b, proxy):
        proxy.set_faults(Fault(Action.SLOW, contains="/v1/memory/", seconds=0.5))
        state = a.seal(1)
        a.replicator.close(20.0)  # type: ignore[union-attr]
        assert b.has(state, 0)


def test_closing_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    with no_threads_stay(), side(tmp_path, "h0", patience_s=60.0) as a:
        with side(tmp_path, "h1") as b:
            enter_both(a, b)
        a.seal(1)
        begun_s = time.monotonic()
        a.replicator.close(50.0)  # type: ignore[union-attr]
        assert time.monotonic() - begun_s < 20.0

"""When a run begins again from nothing, and when that would void what it still has somewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kit.checkpoints import write_images
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.keepers import JOB, TOKEN, eventually, keeper_host
from tests.kit.logs import MESH, open_log

from keepstep.ckpt.beginning import BeginRefused, Home, Wanted
from keepstep.ckpt.choice import Chooser, Told
from keepstep.ckpt.commit import commit
from keepstep.ckpt.document import encode
from keepstep.ckpt.entry import Generation, Parent
from keepstep.ckpt.errors import NotRestorable
from keepstep.ckpt.host_hints import HostHint, publish_hint, read_hint
from keepstep.ckpt.inventory import Copy, Inventory
from keepstep.ckpt.keys import HOSTS_PREFIX, STATES_PREFIX, done_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.survey import Unsure, other_inventories, stored_images
from keepstep.ckpt.tiers import Tier
from keepstep.storage.errors import Transient
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store
from keepstep.storage.token import Token

NOWHERE = "127.0.0.1:9"
Events = list[tuple[str, str, dict[str, Any]]]


def begun(
    log: Log,
    base: State | None = None,
    hosts: Sequence[str] = ("h0", "h1"),
    parent: Parent | None = None,
) -> None:
    """One more generation in the log."""
    log.take_term("a test")
    newest = log.read().generation
    number = 1 if newest is None else newest.number + 1
    log.append(Generation(number, tuple(hosts), MESH, base, parent, {}))


def inventory(host: str, *copies: Copy) -> Inventory:
    return Inventory(host=host, rack="", address="", generation=0, term=0, copies=copies)


def copies_of(state: State, *ranks: int) -> list[Copy]:
    manifest = write_images(MemoryStore(), state)
    return [
        Copy(state, image, Tier.MEMORY, manifest.plan_digest)
        for image in manifest.images
        if image.rank in ranks
    ]


def choose(
    store: Store,
    inventories: Sequence[Inventory],
    *,
    tried: Sequence[str] = (),
    members: Sequence[str] = ("h0",),
    events: Events | None = None,
) -> Told:
    """What a start on h0 decides, whose keepers gave these inventories."""
    told: Events = [] if events is None else events
    wanted = Wanted(
        job="run-a",
        by="a test",
        tell=lambda kind, reason, **details: told.append((kind, reason, details)),
    )
    home = Home(host="h0", token=Token(TOKEN), timeout_s=1.0)
    chooser = Chooser(store, open_log(store), home, wanted, None)
    taken = chooser.take_term()
    chooser.ask_others(members, taken.generation, taken.term)
    return chooser.next(inventories, tried)


def hint(store: Store, host: str) -> None:
    publish_hint(store, HostHint(host, NOWHERE, "2026-01-01T00:00:00.000Z", 1))


def test_a_run_that_left_nothing_begins_again_and_says_so() -> None:
    store = MemoryStore()
    events: Events = []
    begun(open_log(store))
    told = choose(store, [inventory("h0"), inventory("h1")], events=events)
    assert told.state is None
    assert [kind for kind, *_ in events] == ["begun_again"]


def test_a_step_that_never_was_whole_does_not_hold_up_a_run_whose_hosts_all_answer() -> None:
    store = MemoryStore()
    events: Events = []
    begun(open_log(store))
    told = choose(
        store,
        [inventory("h0", *copies_of(State(1, 1), 0)), inventory("h1")],
        members=("h0", "h1"),
        events=events,
    )
    assert told.state is None
    assert [kind for kind, *_ in events] == ["snapshot_incomplete", "begun_again"]


def test_a_run_does_not_begin_again_while_a_host_that_may_have_its_states_is_silent() -> None:
    store = MemoryStore()
    begun(open_log(store))
    hint(store, "h1")
    with pytest.raises(NotRestorable, match=r"no commit.*h1 does not answer"):
        choose(store, [inventory("h0", *copies_of(State(1, 40), 0))])


def test_nor_if_its_last_generation_had_come_to_a_state_that_is_gone() -> None:
    store = MemoryStore()
    begun(open_log(store))
    begun(open_log(store), State(1, 40), ("h0", "h0", "h1"))
    hint(store, "h1")
    with pytest.raises(NotRestorable, match="h1 does not answer"):
        choose(store, [inventory("h0")])


def test_nor_if_no_majority_of_its_hosts_says_what_there_was() -> None:
    store = MemoryStore()
    begun(open_log(store), hosts=("h1", "h2"))
    hint(store, "h1")
    hint(store, "h2")
    with pytest.raises(NotRestorable, match="h1 does not answer"):
        choose(store, [inventory("h0")])


def test_a_run_begins_again_without_a_lost_host_if_the_others_know_of_no_state() -> None:
    store = MemoryStore()
    begun(open_log(store), hosts=("h0", "h1", "h2"))
    hint(store, "h1")
    assert choose(store, [inventory("h0"), inventory("h2")]).state is None


def test_a_state_that_could_not_be_restored_is_not_voided_by_beginning_from_nothing() -> None:
    store = MemoryStore()
    begun(open_log(store))
    with pytest.raises(NotRestorable, match="restoring step 40 failed"):
        choose(store, [inventory("h0"), inventory("h1")], tried=["restoring step 40 failed"])


def test_states_of_generations_that_the_log_never_had_are_refused() -> None:
    """A start on another store: else they would be taken once this log has come so far."""
    store = MemoryStore()
    with pytest.raises(BeginRefused, match=r"h0 has step 40 of generation 1, .* 0 generations"):
        choose(store, [inventory("h0", *copies_of(State(1, 40), 0, 1))])
    assert not open_log(store).read().generations


def test_a_run_without_a_state_begins_again_from_what_it_began_from(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    theirs = FileStore(tmp_path / "theirs")
    log = open_log(theirs, job="other")
    begun(log)
    state = State(1, 9)
    manifest = write_images(theirs, state, job="other")
    commit(log, manifest)
    store = MemoryStore()
    begun(open_log(store), parent=Parent(str(tmp_path / "theirs"), "other", state, True))
    told = choose(store, [inventory("h0"), inventory("h1")])
    assert told.parent == Parent(str(tmp_path / "theirs"), "other", state, True)


# What the store says of others.


def test_a_store_that_does_not_say_where_other_hosts_are_ends_the_start() -> None:
    store = FaultyStore(
        MemoryStore(), Fault(Action.FAIL, times=99, key_prefix=HOSTS_PREFIX, error=Transient)
    )
    with pytest.raises(Unsure, match="does not say where other hosts"):
        other_inventories(
            store, (), JOB, Token(TOKEN), 1.0, (2, 2), lambda *_, **__: None, lambda _: None
        )


def test_a_store_that_stumbles_once_over_other_hosts_is_asked_again() -> None:
    inner = MemoryStore()
    hint(inner, "h1")
    store = FaultyStore(
        inner, Fault(Action.FAIL, times=1, key_prefix=HOSTS_PREFIX, error=Transient)
    )
    found = other_inventories(
        store, (), JOB, Token(TOKEN), 1.0, (2, 2), lambda *_, **__: None, lambda _: None
    )
    assert list(found.silent) == ["h1"]


def test_a_damaged_done_record_hides_no_other() -> None:
    store = MemoryStore()
    events: list[tuple[str, ...]] = []
    log = open_log(store)
    begun(log)
    state = State(1, 40)
    copies = copies_of(state, 0, 1)
    store.put(done_key(state, 0), b"{")
    store.put(done_key(state, 1), encode(copies[1].record))
    found = stored_images(
        store, log.read(), [inventory("h0", *copies)], lambda *all_, **_: events.append(all_)
    )
    assert [one.rank for one in found.records[state]] == [1]
    assert not found.trouble
    assert [kind for kind, _ in events] == ["done_record_refused"]


def test_a_state_is_not_passed_over_while_the_store_may_have_the_rest_of_it() -> None:
    inner = MemoryStore()
    begun(open_log(inner))
    failing = Fault(Action.FAIL, times=99, key_prefix=STATES_PREFIX, error=Transient)
    store = FaultyStore(inner, failing)
    with pytest.raises(BeginRefused, match="the store may have the rest"):
        choose(store, [inventory("h0", *copies_of(State(1, 40), 0)), inventory("h1")])


@pytest.mark.slow
def test_a_keeper_of_another_job_that_listens_where_a_hint_leads_promises_nothing(
    tmp_path: Path,
) -> None:
    with keeper_host(tmp_path, "h1", job="other") as keeper:
        keeper.start()
        theirs = FileStore(tmp_path / "store")
        eventually(lambda: read_hint(theirs, "h1") is not None, "h1's hint")
        found = other_inventories(
            theirs, (), JOB, Token(TOKEN), 20.0, (7, 7), lambda *_, **__: None
        )
        assert found.inventories == ()
        assert "of job other" in found.silent["h1"]
        with contextlib.closing(keeper.client()) as client:
            assert client.take_inventory(1, 1).generation == 1  # Stale, had it promised more

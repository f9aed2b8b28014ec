"""Collecting: what goes, what never goes, and that it may be interrupted or raced anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.checkpoints import begin, save, write_images
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.logs import (
    bad,
    commit,
    generation,
    good,
    open_log,
    records,
    retire,
    rewind,
    state,
    term,
)

from keepstep.ckpt.entry import Retire
from keepstep.ckpt.errors import LogError, Superseded
from keepstep.ckpt.gc import Report, collect, protected, to_collect
from keepstep.ckpt.keys import (
    description_key,
    done_key,
    entry_key,
    host_key,
    image_key,
    manifest_key,
    state_prefix,
)
from keepstep.ckpt.lineage import fold
from keepstep.ckpt.log import read_entry
from keepstep.ckpt.manifest import State
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.verify import verify
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

KEEP_1 = Policy(keep_last=1)


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list("")}


def files_of(store: Store, at: State) -> set[str]:
    return {info.key for info in store.list(state_prefix(at))}


def run(store: Store, policy: Policy = KEEP_1, *, is_dry_run: bool = False) -> Report:
    return collect(open_log(store), policy, is_dry_run=is_dry_run)


def test_retention_goes_by_the_policy_and_what_stays_verifies() -> None:
    store = MemoryStore()
    begin(store, 10, 20, 30, 40)
    report = run(store, Policy(keep_last=2))
    assert report.retired == (state(1, 10), state(1, 20))
    assert report.kept == (state(1, 40), state(1, 30))
    assert {doomed.key for doomed in report.deleted} == {
        key
        for step in (10, 20)
        for key in (
            manifest_key(state(1, step)),
            image_key(state(1, step), 0),
            image_key(state(1, step), 1),
        )
    }
    assert files_of(store, state(1, 10)) == set()
    after = verify(store)
    assert after.findings == ()
    assert after.unreferenced == ()
    assert [each.state.step for each in after.states] == [40, 30]


@pytest.mark.parametrize("harm", ["image gone", "image cut", "manifest gone", "manifest wrong"])
def test_a_newest_commit_with_lost_files_does_not_cost_the_last_good_one(harm: str) -> None:
    store = MemoryStore()
    begin(store, 10, 20, 30)
    newest = state(1, 30)
    key = image_key(newest, 1) if "image" in harm else manifest_key(newest)
    data = store.get(key, 1 << 20)
    store.delete(key)
    if not harm.endswith("gone"):
        store.put(key, data[:-1])
    assert run(store).retired == (state(1, 10),)
    assert run(store).retired == ()
    assert [each.state.step for each in open_log(store).read().live] == [30, 20]
    assert all("30" in finding.file for finding in verify(store).findings)


def test_retire_is_in_the_log_before_anything_goes_and_manifests_go_before_images() -> None:
    store = FaultyStore(MemoryStore())
    begin(store, 10, 20, 30)
    before = len(store.calls)
    run(store)
    writes = [(what, key) for what, key in store.calls[before:] if what in WRITES]
    assert writes == [
        ("put_if_absent", entry_key(5)),
        ("delete", manifest_key(state(1, 10))),
        ("delete", image_key(state(1, 10), 0)),
        ("delete", image_key(state(1, 10), 1)),
        ("delete", manifest_key(state(1, 20))),
        ("delete", image_key(state(1, 20), 0)),
        ("delete", image_key(state(1, 20), 1)),
    ]


def test_a_dry_run_shows_exactly_what_would_go_and_changes_nothing() -> None:
    store = FaultyStore(MemoryStore())
    begin(store, 10, 20, 30)
    write_images(store, state(1, 25))
    before = keys(store)
    calls = len(store.calls)
    dry = run(store, is_dry_run=True)
    assert not WRITES & {what for what, _ in store.calls[calls:]}
    assert keys(store) == before
    wet = run(store)
    assert (dry.retired, dry.kept) == (wet.retired, wet.kept)
    assert [d.key for d in dry.deleted] == [d.key for d in wet.deleted]
    assert dry.deleted_bytes == wet.deleted_bytes > 0
    assert before - keys(store) == {doomed.key for doomed in dry.deleted}
    assert dry.is_dry_run
    assert not wet.is_dry_run


@pytest.mark.parametrize("keep_last", [0, 1])
def test_the_last_good_one_stays(keep_last: int) -> None:
    store = MemoryStore()
    begin(store, 10)
    before = keys(store)
    report = run(store, Policy(keep_last=keep_last))
    assert (report.retired, report.deleted) == ((), ())
    assert keys(store) == before


def test_keep_0_keeps_every_commit_and_still_takes_what_nothing_refers_to() -> None:
    store = MemoryStore()
    log = begin(store, 10, 20)
    log.append(generation(2, state(1, 10)))
    save(log, state(2, 30))
    write_images(store, state(1, 15))
    report = run(store, Policy(keep_last=0))
    assert report.retired == ()
    assert {doomed.key.split("/r")[0] for doomed in report.deleted} == {
        "states/g000001/s000000000015"
    }
    assert len(files_of(store, state(1, 20))) == 3


def test_when_the_newest_are_bad_the_last_good_one_stays() -> None:
    store = MemoryStore()
    log = begin(store, 10, 20, 30)
    log.append(bad(1, 15))
    report = run(store)
    assert report.kept == (state(1, 10),)
    assert report.retired == (state(1, 20), state(1, 30))
    assert verify(store).findings == ()


def test_a_verdict_of_good_protects_the_newest_that_has_it() -> None:
    lineage = fold(
        records(
            [term(1), generation(1), *[commit(1, s) for s in (1, 2, 3, 4)], good(1, 1), good(1, 2)]
        )
    )
    assert protected(lineage) == {state(1, 4), state(1, 2)}
    assert [each.state for each in to_collect(lineage, KEEP_1)] == [state(1, 1), state(1, 3)]


def test_void_ones_go_with_the_rest() -> None:
    store = MemoryStore()
    log = begin(store, 10, 20, 30)
    log.append(rewind(state(1, 20), "operator asked"))
    report = run(store, Policy(keep_last=5))
    assert report.retired == (state(1, 30),)
    assert files_of(store, state(1, 30)) == set()


def test_images_of_the_newest_generation_above_its_last_commit_are_not_touched() -> None:
    store = MemoryStore()
    begin(store, 10)
    write_images(store, state(1, 20))
    report = run(store)
    assert report.deleted == ()
    assert len(files_of(store, state(1, 20))) == 2


def test_a_save_that_goes_on_during_a_collection_is_committed_whole() -> None:
    """The race that matters: images are there, gc runs, then the commit is appended."""
    store = MemoryStore()
    log = begin(store, 10)
    manifest = write_images(store, state(1, 20))
    run(store)
    from keepstep.ckpt.commit import commit as commit_state

    commit_state(log, manifest)
    assert verify(store).findings == ()
    assert [each.state.step for each in log.read().live] == [20, 10]


def test_a_generation_that_the_log_did_not_name_yet_is_not_touched() -> None:
    store = MemoryStore()
    begin(store, 10)
    write_images(store, state(2, 11))
    write_images(store, state(7, 5))
    assert run(store).deleted == ()


def test_what_can_never_be_committed_goes() -> None:
    """Left by a failed save below the last commit, and by a generation that has a successor."""
    store = MemoryStore()
    log = begin(store, 10)
    write_images(store, state(1, 9))
    write_images(store, state(1, 15))
    log.append(generation(2, state(1, 10)))
    write_images(store, state(2, 10))
    report = run(store)
    states = {"/".join(doomed.key.split("/")[:3]) for doomed in report.deleted}
    assert states == {
        "states/g000001/s000000000009",
        "states/g000001/s000000000015",
        "states/g000002/s000000000010",
    }
    assert {doomed.reason for doomed in report.deleted} == {
        "unreferenced: it was never committed, and never will be"
    }


def test_foreign_files_are_listed_and_left() -> None:
    store = MemoryStore()
    begin(store, 10, 20)
    foreign = {
        "README.md",
        "states/g000001/s000000000010/notes.txt",
        "states/g000001/s10/manifest.json",
        "states/g000001/s000000000010/r1.safetensors",
        "log/000007/000000003",
        "log/README",
    }
    for key in foreign:
        store.put(key, b"mine")
    report = run(store)
    assert {info.key for info in report.foreign} == foreign
    assert foreign <= keys(store)
    assert entry_key(0) in keys(store)


def test_leftovers_go_when_nobody_who_counts_can_be_writing_them(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    log = begin(store, 10)
    log.append(generation(2, state(1, 10)))

    def leave(key: str) -> Path:
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        left = path.with_name(f".keepstep-tmp-{path.name}~0123456789abcdef")
        left.write_bytes(b"half")
        return left

    dead = [leave(image_key(state(1, 20), 0)), leave(manifest_key(state(1, 10)))]
    dead.append(leave(entry_key(0)))
    alive = [leave(image_key(state(2, 20), 0)), leave(entry_key(4)), leave("somebody/else")]
    report = run(store)
    assert sorted(d.key for d in report.deleted) == sorted(
        [image_key(state(1, 20), 0), manifest_key(state(1, 10)), entry_key(0)]
    )
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in alive)
    assert verify(store).findings == ()


def test_an_interrupted_collection_is_finished_by_the_next() -> None:
    """Goal: dies at any write, and every time the store verifies and the next call ends alike."""
    counted = FaultyStore(MemoryStore())
    begin(counted, 10, 20, 30)
    writes_before = len([1 for what, _ in counted.calls if what in WRITES])
    run(counted)
    final = keys(counted)
    writes = len([1 for what, _ in counted.calls if what in WRITES]) - writes_before
    assert writes == 7
    for action in (Action.CRASH_BEFORE, Action.CRASH_AFTER):
        for at in range(writes):
            store = MemoryStore()
            begin(store, 10, 20, 30)
            with pytest.raises(Crashed):
                run(FaultyStore(store, Fault(action, at=at, operations=WRITES)))
            assert verify(store).findings == ()
            run(store)
            assert keys(store) == final
            assert verify(store).unreferenced == ()


def test_every_manifest_that_is_there_has_its_images_throughout() -> None:
    """I2, watched from outside: at no write of a collection is a manifest without its images."""
    store = MemoryStore()

    class Watched(FaultyStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            for step in (10, 20, 30):
                if manifest_key(state(1, step)) in keys(store):
                    assert len(files_of(store, state(1, step))) == 3

    begin(store, 10, 20, 30)
    run(Watched(store))
    assert files_of(store, state(1, 20)) == set()


def test_a_rewind_that_comes_between_decision_and_entry_is_heeded() -> None:
    """The log moves just before `retire` is appended: what was to go is now the last good one."""
    inner = MemoryStore()
    begin(inner, 10, 20, 30)

    class Moved(FaultyStore):
        is_quiet = False

        def put_if_absent(self, key: str, data: object) -> None:
            if not self.is_quiet:
                self.is_quiet = True
                other = open_log(inner)
                other.take_term("operator")
                other.append(rewind(state(1, 10), "operator asked"))
            super().put_if_absent(key, data)  # type: ignore[arg-type]

    report = run(Moved(inner))
    assert report.kept == (state(1, 10),)
    assert [each.state for each in open_log(inner).read().live] == [state(1, 10)]
    assert verify(inner).findings == ()


def test_a_log_that_never_stands_still_is_given_up() -> None:
    inner = MemoryStore()
    begin(inner, 10, 20)

    class Restless(FaultyStore):
        def put_if_absent(self, key: str, data: object) -> None:
            other = open_log(inner)
            other.take_term("somebody")
            super().put_if_absent(key, data)  # type: ignore[arg-type]

    before = {key for key in keys(inner) if key.startswith("states")}
    with pytest.raises(LogError, match="nothing was deleted"):
        run(Restless(inner))
    assert {key for key in keys(inner) if key.startswith("states")} == before


def test_a_superseded_run_collects_nothing() -> None:
    store = MemoryStore()
    old = begin(store, 10, 20)
    open_log(store).take_term("trainer on host-b, pid 2")
    with pytest.raises(Superseded):
        collect(old, KEEP_1)
    assert len(files_of(store, state(1, 10))) == 3


def test_a_collection_beside_a_run_does_not_end_it() -> None:
    """It borrows the run's term, and takes none."""
    store = MemoryStore()
    log = begin(store, 10, 20, 30)
    run(store)
    save(log, state(1, 40))
    entries = [read_entry(store, seq) for seq in range(7)]
    kinds = [type(entry.body).__name__ for entry in entries if entry is not None]
    assert kinds == ["Term", "Generation", "Commit", "Commit", "Commit", "Retire", "Commit"]
    assert isinstance(entries[5].body if entries[5] else None, Retire)
    assert log.read().ignored == ()


def test_a_run_that_collects_after_each_commit_does_not_list_its_log() -> None:
    store = FaultyStore(MemoryStore())
    log = begin(store, 10, 20, 30)
    before = len(store.calls)
    assert collect(log, KEEP_1, is_thorough=False).retired == (state(1, 10), state(1, 20))
    looks = [(what, key) for what, key in store.calls[before:] if what in ("list", "leftovers")]
    assert looks == [("list", "states/"), ("leftovers", "states/")]


def test_an_empty_store_and_one_without_a_log_are_left_alone() -> None:
    store = MemoryStore()
    assert run(store).deleted == ()
    write_images(store, state(1, 10))
    assert run(store).deleted == ()
    assert len(keys(store)) == 2


def test_what_was_retired_by_hand_is_finished() -> None:
    store = MemoryStore()
    log = begin(store, 10, 20, 30)
    log.append(retire(state(1, 10)))
    report = run(store, Policy(keep_last=0))
    assert {doomed.reason for doomed in report.deleted} == {"retired earlier: retention (entry 5)"}
    assert files_of(store, state(1, 10)) == set()


def test_done_records_go_when_their_state_is_committed_or_never_can_be() -> None:
    store = MemoryStore()
    begin(store, 10, 20)
    for step in (15, 20, 30):
        store.put(done_key(state(1, step), 0), b"{}")
    store.put(description_key(state(1, 15)), b"{}")
    report = run(store)
    assert {doomed.key: doomed.reason for doomed in report.deleted if "json" in doomed.key} == {
        manifest_key(state(1, 10)): "retired",
        done_key(state(1, 15), 0): "unreferenced: it was never committed, and never will be",
        description_key(state(1, 15)): "unreferenced: it was never committed, and never will be",
        done_key(state(1, 20), 0): "of no use any more: entry 3 commits its state",
    }
    assert done_key(state(1, 30), 0) in keys(store), "its state may be committed yet"
    assert done_key(state(1, 20), 0) not in keys(store)


def test_hints_of_hosts_are_no_strangers_and_are_left_alone() -> None:
    store = MemoryStore()
    begin(store, 10)
    store.put(host_key("h0"), b"{}")
    report = run(store)
    assert (report.deleted, report.foreign) == ((), ())
    assert host_key("h0") in keys(store)


def test_the_base_of_the_newest_generation_stays_until_that_has_a_commit() -> None:
    """It was never committed, but the next generation may have to begin there again."""
    store = MemoryStore()
    log = begin(store, 10)
    for step in (14, 15):
        write_images(store, state(1, step))
    log.append(generation(2, base=state(1, 15)))
    assert {doomed.key for doomed in run(store).deleted} == images_of(14)
    assert len(files_of(store, state(1, 15))) == 2
    save(log, state(2, 20))
    run(store)
    assert files_of(store, state(1, 15)) == set()


def images_of(step: int) -> set[str]:
    return {image_key(state(1, step), rank) for rank in (0, 1)}

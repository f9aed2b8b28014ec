"""Committing: all or nothing, in the stated order, and refused with reasons."""

from __future__ import annotations

import msgspec
import pytest
from tests.kit.checkpoints import begin, save, write_images
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.logs import bad, generation, open_log, rewind, state

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Commit
from keepstep.ckpt.errors import FormatError, NotCommitted, Superseded
from keepstep.ckpt.keys import entry_key, image_key, manifest_key
from keepstep.ckpt.manifest import decode_manifest
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.verify import verify
from keepstep.storage.errors import Denied, NoSpace, NotFound, OutcomeUnknown
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store


def test_a_commit_writes_the_manifest_then_the_entry() -> None:
    store = FaultyStore(MemoryStore())
    log = begin(store)
    manifest = write_images(store, state(1, 10))
    before = len(store.calls)
    record = commit(log, manifest)
    writes = [call for call in store.calls[before:] if call[0].startswith("put")]
    assert writes == [("put", manifest_key(state(1, 10))), ("put_if_absent", entry_key(2))]
    data = store.get(manifest_key(state(1, 10)), 1 << 20)
    assert isinstance(record.body, Commit)
    assert record.body.manifest_digest == digest128(data)
    assert record.body.size_bytes == len(data) + sum(i.size_bytes for i in manifest.images)
    assert decode_manifest(data, "manifest") == manifest
    assert log.read().live[0].state == state(1, 10)


def is_refused(store: Store, message: str, step: int = 10) -> None:
    log = open_log(store)
    log.take_term("trainer")
    lineage = log.read()
    assert lineage.generation is not None
    manifest = write_images(store, state(lineage.generation.number, step))
    with pytest.raises(NotCommitted, match=message):
        commit(log, manifest)


def test_a_missing_image_is_named() -> None:
    store = MemoryStore()
    log = begin(store)
    manifest = write_images(store, state(1, 10))
    store.delete(image_key(state(1, 10), 1))
    with pytest.raises(NotCommitted, match=r"r00001.safetensors \(rank 1\) is missing") as caught:
        commit(log, manifest)
    assert len(caught.value.reasons) == 1
    with pytest.raises(NotFound):
        store.get(manifest_key(state(1, 10)), 1 << 20)
    assert log.read().live == ()


def test_an_image_of_another_size_is_named_with_both() -> None:
    store = MemoryStore()
    log = begin(store)
    manifest = write_images(store, state(1, 10))
    key = image_key(state(1, 10), 0)
    whole = store.get(key, 1 << 20)
    store.put(key, whole[:-1])
    with pytest.raises(NotCommitted, match=rf"{len(whole) - 1} bytes, rank 0 wrote {len(whole)}"):
        commit(log, manifest)


def test_a_rank_that_is_not_in_the_manifest_is_noticed() -> None:
    """Planned is compared with written: half an optimizer must not pass for a checkpoint."""
    store = MemoryStore()
    log = begin(store)
    manifest = write_images(store, state(1, 10))
    with pytest.raises(FormatError, match=r"images: expected \d+ bytes of data in all"):
        commit(log, msgspec.structs.replace(manifest, images=manifest.images[:1]))
    assert log.read().live == ()


def test_what_the_log_would_not_count_is_refused_before_the_manifest_is_written() -> None:
    store = MemoryStore()
    log = begin(store, 10)
    before = store.get(manifest_key(state(1, 10)), 1 << 20)
    changed = msgspec.structs.replace(write_images(store, state(1, 10)), values={"step": 99})
    with pytest.raises(NotCommitted, match="already stands at step 10"):
        commit(log, changed)
    assert store.get(manifest_key(state(1, 10)), 1 << 20) == before
    with pytest.raises(NotCommitted, match="newest generation is 1, not 2"):
        commit(log, write_images(store, state(2, 20)))
    other = write_images(store, state(1, 20), job="run-b")
    with pytest.raises(NotCommitted, match="of job 'run-b', the store of job 'run-a'"):
        commit(log, other)


def test_a_mesh_other_than_the_generations_is_refused() -> None:
    store = MemoryStore()
    log = open_log(store)
    log.take_term("trainer")
    mesh = Mesh((MeshAxis("dp_shard", 4),))
    log.append(msgspec.structs.replace(generation(1), mesh=mesh))
    with pytest.raises(NotCommitted, match="mesh is not the one"):
        save(log, state(1, 10))


def test_a_commit_after_a_rewind_or_of_a_bad_line_says_why_it_does_not_count() -> None:
    store = MemoryStore()
    log = begin(store, 10)
    log.append(rewind(state(1, 10), "operator asked"))
    with pytest.raises(NotCommitted, match="only a new generation may commit"):
        save(log, state(1, 20))
    log.append(generation(2, state(1, 10)))
    log.append(bad(2, 15))
    with pytest.raises(NotCommitted, match=r"it is bad: .*loss exploded"):
        save(log, state(2, 20))
    assert [each.state for each in log.read().live] == [state(1, 10)]


def test_a_superseded_run_cannot_commit() -> None:
    store = MemoryStore()
    old = begin(store, 10)
    new = open_log(store)
    new.take_term("trainer on host-b, pid 2")
    with pytest.raises(Superseded, match="host-b"):
        save(old, state(1, 20))
    assert [each.state for each in new.read().live] == [state(1, 10)]


def test_a_full_disk_leaves_the_last_commit_and_the_errno() -> None:
    inner = MemoryStore()
    begin(inner, 10)
    full = Fault(Action.FAIL, operations=frozenset({"put"}), error=NoSpace, errno=28)
    log = open_log(FaultyStore(inner, full))
    log.take_term("trainer")
    log.append(generation(2, state(1, 10)))
    manifest = write_images(inner, state(2, 20))
    with pytest.raises(NoSpace) as caught:
        commit(log, manifest)
    assert caught.value.errno == 28
    assert [each.state for each in log.read().live] == [state(1, 10)]
    assert commit(log, manifest).seq == 5


def test_a_lost_answer_does_not_commit_twice() -> None:
    inner = MemoryStore()
    lost = Fault(Action.LOSE_ANSWER, at=2, times=1, operations=frozenset({"put_if_absent"}))
    log = begin(FaultyStore(inner, lost), 10, 20)
    lineage = open_log(inner).read()
    assert [each.state.step for each in lineage.live] == [20, 10]
    assert lineage.ignored == ()
    assert lineage == log.read()


def test_a_store_that_fails_after_the_entry_is_in_does_not_unsay_the_commit() -> None:
    inner = MemoryStore()
    behind = Fault(Action.FAIL, times=100, key_prefix=entry_key(3), error=Denied)
    log = begin(FaultyStore(inner, behind))
    record = commit(log, write_images(inner, state(1, 10)))
    assert record.seq == 2
    assert open_log(inner).read().live[0].state == state(1, 10)


def test_an_answer_that_never_comes_is_reported_as_unknown() -> None:
    inner = MemoryStore()
    begin(inner, 10)
    down = Fault(
        Action.FAIL,
        at=2,
        times=1000,
        operations=frozenset({"put_if_absent"}),
        error=OutcomeUnknown,
    )
    log = open_log(FaultyStore(inner, down))
    log.take_term("trainer")
    log.append(generation(2, state(1, 10)))
    with pytest.raises(OutcomeUnknown):
        save(log, state(2, 20))


def test_a_save_killed_at_any_write_shows_the_old_or_the_new_commit() -> None:
    """Goal: crash points. After each, the store verifies, and a successor can commit on it."""

    def second_save(store: Store) -> None:
        log = open_log(store)
        log.take_term("trainer")
        log.append(generation(2, state(1, 10)))
        save(log, state(2, 20))

    whole = MemoryStore()
    begin(whole, 10)
    counted = FaultyStore(whole)
    second_save(counted)
    writes = sum(operation in WRITES for operation, _ in counted.calls)
    seen = set()
    for action in (Action.CRASH_BEFORE, Action.CRASH_AFTER):
        for at in range(writes):
            inner = MemoryStore()
            begin(inner, 10)
            with pytest.raises(Crashed):
                second_save(FaultyStore(inner, Fault(action, at=at, operations=WRITES)))
            log = open_log(inner)
            live = [each.state for each in log.read().live]
            assert live in ([state(1, 10)], [state(2, 20), state(1, 10)])
            seen.add(len(live))
            assert verify(inner).findings == ()
            log.take_term("successor")
            log.append(generation(3, live[0]))
            save(log, state(3, 30))
            assert verify(inner).findings == ()
    assert seen == {1, 2}

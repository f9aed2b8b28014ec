"""One test for each invariant of docs/format.md, by its number.

Most watch a store from outside while a run lives through a save, a restart, a rewind and
collections, and check the invariant after every single write; so it holds wherever one is killed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.checkpoints import begin, save, write_images
from tests.kit.crash_drain import drain_save
from tests.kit.crash_save import prepare
from tests.kit.faulty_store import WRITES, FaultyStore
from tests.kit.logs import (
    bad,
    commit,
    generation,
    good,
    open_log,
    record,
    records,
    rewind,
    state,
    term,
)
from tests.kit.make_store import mesh, split

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.commit import commit as commit_state
from keepstep.ckpt.entry import Commit, Retire, encode_record
from keepstep.ckpt.errors import FormatError, NotCommitted, WrongJob
from keepstep.ckpt.gc import collect
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.keys import (
    DoneKey,
    EntryKey,
    ImageKey,
    ManifestKey,
    entry_key,
    image_key,
    manifest_key,
    parse_key,
)
from keepstep.ckpt.lineage import fold
from keepstep.ckpt.log import read_entries
from keepstep.ckpt.manifest import TensorSpec, decode_manifest
from keepstep.ckpt.placement import mesh_size
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.store_tier import read_done
from keepstep.ckpt.verify import verify
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "format.md"
KEEP_1 = Policy(keep_last=1)
Check = Callable[[Store, str, str], None]


class Watched(FaultyStore):
    """Calls `check(store, operation, key)` after each write; `before` ahead of it."""

    def __init__(self, check: Check | None = None, before: Check | None = None) -> None:
        self.inside = MemoryStore()
        super().__init__(self.inside)
        self._check = check
        self._before = before

    def _do(self, operation, key, call, data=b""):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if self._before is not None and operation in WRITES:
            self._before(self.inside, operation, key)
        result = super()._do(operation, key, call, data)
        if self._check is not None and operation in WRITES:
            self._check(self.inside, operation, key)
        return result


def live_through(store: Store) -> None:
    """A run, a save that fails, a restart, a bad state, a rewind, and collections between."""
    log = begin(store, 10, 20, 30)
    write_images(store, state(1, 40))
    collect(log, Policy(keep_last=2))
    log = open_log(store)
    log.take_term("trainer on host-b, pid 2")
    log.append(generation(2, state(1, 20)))
    save(log, state(2, 30))
    save(log, state(2, 40))
    collect(log, KEEP_1)
    log.append(bad(2, 35))
    collect(log, KEEP_1)
    log.append(rewind(state(2, 30), "operator asked"))
    log.append(generation(3, state(2, 30)))
    save(log, state(3, 50))
    write_images(store, state(3, 60))
    collect(log, KEEP_1)


def watch(check: Check | None = None, before: Check | None = None) -> Watched:
    store = Watched(check, before)
    live_through(store)
    assert verify(store.inside).findings == ()
    return store


def numbers_in_document() -> set[str]:
    return set(re.findall(r"^- \*\*(I[0-9]+)\*\*", DOCUMENT.read_text(), re.MULTILINE))


def test_every_number_of_the_document_has_its_test_and_the_other_way_round() -> None:
    names = vars(sys.modules[__name__])
    tested = {m[1] for name in names if (m := re.match(r"test_(I[0-9]+)_", name))}
    numbers = numbers_in_document()
    assert tested == numbers
    assert numbers == {f"I{n}" for n in range(1, len(numbers) + 1)}


def test_no_line_of_the_document_cites_a_number_that_is_not_there() -> None:
    dtypes = {"I16", "I32", "I64"}
    cited = set(re.findall(r"\bI[0-9]+\b", DOCUMENT.read_text())) - dtypes
    assert cited <= numbers_in_document()


def test_I1_a_commit_names_only_what_is_there_and_whole() -> None:
    seen = 0

    def check(store: Store, operation: str, key: str) -> None:
        nonlocal seen
        lineage = fold(read_entries(store))
        for each in lineage.live:
            seen += 1
            data = store.get(manifest_key(each.state), 1 << 20)
            assert digest128(data) == each.manifest_digest
            for image in decode_manifest(data, "manifest").images:
                assert store.stat(image_key(each.state, image.rank)).size_bytes == image.size_bytes

    watch(check)
    assert seen > 20


def test_I2_a_manifest_is_there_only_with_its_images() -> None:
    def check(store: Store, operation: str, key: str) -> None:
        for info in store.list("states/"):
            found = parse_key(info.key)
            if isinstance(found, ManifestKey):
                manifest = decode_manifest(store.get(info.key, 1 << 20), info.key)
                for image in manifest.images:
                    store.stat(image_key(found.state, image.rank))

    watch(check)


def test_I3_files_of_a_committed_state_never_change() -> None:
    contents: dict[str, bytes] = {}

    def check(store: Store, operation: str, key: str) -> None:
        committed = {each.state for each in fold(read_entries(store)).commits}
        for info in store.list("states/"):
            found = parse_key(info.key)
            if isinstance(found, ManifestKey | ImageKey) and found.state in committed:
                data = store.get(info.key, 1 << 20)
                assert contents.setdefault(info.key, data) == data

    store = watch(check)
    assert len(contents) > 12
    log = open_log(store)
    log.take_term("somebody")
    before = store.get(manifest_key(state(3, 50)), 1 << 20)
    changed = msgspec.structs.replace(write_images(store, state(3, 50)), values={"step": 0})
    with pytest.raises(NotCommitted):
        commit_state(log, changed)
    assert store.get(manifest_key(state(3, 50)), 1 << 20) == before


def test_I4_the_log_only_grows_and_a_hole_is_an_error() -> None:
    known: list[bytes] = []

    def check(store: Store, operation: str, key: str) -> None:
        entries = [store.get(info.key, 1 << 20) for info in store.list("log/")]
        assert entries[: len(known)] == known
        assert len(entries) - len(known) in (0, 1)
        known[:] = entries

    store = watch(check).inside
    assert len(known) > 12
    store.delete(entry_key(5))
    with pytest.raises(FormatError, match="000000005"):
        open_log(store).read()


def test_I5_only_entries_of_the_current_term_count() -> None:
    log = records([term(2), generation(1), commit(1, 10), term(5)])
    for seq, number in enumerate((2, 4, 6), start=4):
        log.append(record(seq, number, commit(1, 20 + seq)))
    log.append(record(7, 3, term(3)))
    lineage = fold(log)
    assert [each.state for each in lineage.live] == [state(1, 10)]
    assert lineage.term == 5
    assert [each.seq for each in lineage.ignored] == [4, 5, 6, 7]


def test_I6_generations_ascend_and_begin_on_the_lineage() -> None:
    lineage = fold(
        records(
            [
                term(1),
                generation(3),
                commit(3, 10),
                generation(3, state(3, 10)),
                generation(2, state(3, 10)),
                generation(4, state(3, 10)),
                generation(5, state(3, 11)),
                generation(6, state(9, 1)),
                generation(7, state(4, 12)),
            ]
        )
    )
    assert [each.number for each in lineage.generations] == [3, 4, 7]


def test_I7_only_the_newest_generation_commits_and_not_after_a_rewind() -> None:
    start = [term(1), generation(1), commit(1, 10), generation(2, state(1, 10))]
    lineage = fold(records([*start, commit(1, 20), commit(2, 20), rewind(state(2, 20))]))
    assert [each.state for each in lineage.live] == [state(2, 20), state(1, 10)]
    later = [*start, rewind(state(1, 10)), commit(2, 30), commit(1, 30)]
    assert [each.state for each in fold(records(later)).live] == [state(1, 10)]


STEPS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=30)


@given(STEPS)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_I8_commits_ascend_and_a_step_has_one_live_commit(pairs: list[tuple[int, int]]) -> None:
    bodies = [term(1), generation(1)]
    for number, step in pairs:
        bodies += [generation(number, state(number - 1, step)), commit(number, step)]
        bodies += [commit(number, step + 2), commit(number, step + 1)]
    lineage = fold(records(bodies))
    steps = [each.state.step for each in lineage.live]
    assert steps == sorted(set(steps), reverse=True)
    for each in lineage.generations:
        made = [
            c.state.step for c in reversed(lineage.commits) if c.state.generation == each.number
        ]
        floor = -1 if each.base is None else each.base.step
        assert made == sorted(set(made))
        assert all(step > floor for step in made)


def test_I9_bad_stays_bad_with_all_that_descends() -> None:
    log = [
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        good(1, 20),
        generation(2, state(1, 20)),
        commit(2, 30),
        bad(1, 15),
        good(1, 20),
        commit(2, 40),
        generation(3, state(2, 40)),
    ]
    lineage = fold(records(log))
    assert [each.state for each in lineage.live] == [state(1, 10)]
    assert lineage.good == {}
    assert [each.number for each in lineage.generations] == [1, 2]


def test_I10_retired_before_deleted() -> None:
    deleted = 0

    def before(store: Store, operation: str, key: str) -> None:
        nonlocal deleted
        found = parse_key(key)
        if operation != "delete" or not isinstance(found, ManifestKey | ImageKey):
            return
        lineage = fold(read_entries(store))
        if found.state in {each.state for each in lineage.commits}:
            deleted += 1
            assert found.state in lineage.retired

    watch(before=before)
    assert deleted > 6


@given(
    st.lists(
        st.sampled_from(
            [*(commit(1, n) for n in range(1, 8)), *(good(1, n) for n in range(1, 8)), bad(1, 6)]
        ),
        max_size=20,
    ),
    st.integers(0, 3),
    st.integers(0, 4),
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_I11_the_last_good_one_is_never_retired(
    bodies: list[Commit], keep_last: int, keep_every: int
) -> None:
    store = MemoryStore()
    for each in records([term(1), generation(1), *bodies]):
        store.put(entry_key(each.seq), encode_record(each))
    before = fold(read_entries(store))
    collect(open_log(store), Policy(keep_last, keep_every))
    after = {each.state for each in fold(read_entries(store)).live}
    for kept in (before.live[:1], [each for each in before.live if each.state in before.good][:1]):
        assert {each.state for each in kept} <= after


def test_I12_only_our_files_go_and_nothing_that_may_still_be_committed() -> None:
    store = MemoryStore()
    log = begin(store, 10, 20)
    pending = write_images(store, state(1, 30))
    write_images(store, state(2, 30))
    foreign = ["notes.txt", "states/g000001/s000000000010/x", "log/000001/000000000"]
    for key in foreign:
        store.put(key, b"mine")
    before = {info.key for info in store.list("")}
    collect(log, KEEP_1)
    gone = before - {info.key for info in store.list("")}
    assert {key.rsplit("/", 1)[0] for key in gone} == {"states/g000001/s000000000010"}
    assert not gone & set(foreign)
    commit_state(log, pending)
    assert verify(store).findings == ()


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(
            st.lists(st.integers(0, 400), max_size=3), st.sampled_from(["F32", "BF16", "U8"])
        ),
        max_size=5,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_I13_each_byte_lies_in_exactly_one_image(
    shapes: dict[str, tuple[list[int], str]], dp: int, tp: int
) -> None:
    placements = (split(), split("tp:0"), split("tp:0", "dp:0"), split("dp:1", tp=(0,)))
    specs = {}
    for name, (shape, dtype) in shapes.items():
        fitting = (0, 0, 2, 3)[min(len(shape), 3)]
        specs[name] = TensorSpec(shape=tuple(shape), dtype=dtype, placement=fitting)
    grid = mesh(dp=dp, tp=tp)
    plan = Plan(grid, placements, specs)
    count = {name: np.zeros(spec.shape, np.int8) for name, spec in specs.items()}
    for rank in range(mesh_size(grid)):
        for name, box in plan.owned(rank).items():
            count[name][slices(box)] += 1
    assert all((each == 1).all() for each in count.values())


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def test_I14_each_byte_that_the_log_refers_to_is_covered() -> None:
    store = MemoryStore()
    begin(store, 10)
    for info in list(store.list("")):
        data = store.get(info.key, 1 << 20)
        for place in {*range(0, len(data), 41), len(data) - 1}:
            changed = bytearray(data)
            changed[place] ^= 0x10
            store.put(info.key, bytes(changed))
            assert {each.file for each in verify(store).findings} == {info.key}, place
        store.put(info.key, data)
    assert verify(store).findings == ()


def test_I15_a_store_holds_one_job() -> None:
    store = MemoryStore()
    log = begin(store, 10)
    with pytest.raises(WrongJob):
        open_log(store, job="run-b").take_term("trainer")
    with pytest.raises(NotCommitted, match="of job 'run-b'"):
        commit_state(log, write_images(store, state(1, 20), job="run-b"))
    for info in store.list(""):
        assert b"run-a" in store.get(info.key, 1 << 20) or "s000000000020" in info.key
    store.put(entry_key(3), encode_record(record(3, 1, commit(1, 20), job="run-b")))
    with pytest.raises(WrongJob):
        open_log(store).read()
    assert [each.part for each in verify(store).findings] == ["job"]


def test_I16_an_image_is_safetensors_aligned_and_written_in_one_way(tmp_path: Path) -> None:
    store = MemoryStore()
    begin(store, 10)
    for rank in range(2):
        data = store.get(image_key(state(1, 10), rank), 1 << 20)
        path = tmp_path / f"{rank}.safetensors"
        path.write_bytes(data)
        size = header_size(data, "image", len(data))
        assert size % 4096 == 0
        header = parse(data[:size], "image", len(data))
        with safetensors.safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == set(header.items)
        swapped = data[:size].replace(
            b'"job":"run-a","keepstep":"1"', b'"keepstep":"1","job":"run-a"'
        )
        assert swapped != data[:size]
        with pytest.raises(FormatError):
            parse(swapped, "image", len(data))


def test_I17_a_done_record_stands_for_an_image_that_is_whole_and_stays() -> None:
    seen: dict[str, bytes] = {}

    def check(store: Store, operation: str, key: str) -> None:
        for info in store.list("states/"):
            found = parse_key(info.key)
            if isinstance(found, DoneKey):
                record = read_done(store, found.state, found.rank)
                image = store.get(image_key(found.state, found.rank), 1 << 20)
                assert len(image) == record.size_bytes
                assert digest128(image[: record.header_bytes]) == record.digest
                assert seen.setdefault(info.key, image) == image

    store = Watched(check)
    prepare(store)
    drain_save(store)
    assert len(seen) == 2
    assert verify(store.inside).unreferenced == ()


def test_the_life_that_is_watched_has_all_kinds_of_writes_in_it() -> None:
    """Else the watching tests would watch nothing."""
    store = watch()
    operations = {operation for operation, _ in store.calls}
    assert {"put", "put_if_absent", "delete"} <= operations
    entries = list(read_entries(store))
    assert sum(isinstance(each.body, Retire) for each in entries) >= 3
    kinds = {type(parse_key(info.key)) for info in store.list("")}
    assert kinds == {EntryKey, ManifestKey, ImageKey}

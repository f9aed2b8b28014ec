"""Resharding: any state, any placements, any layouts; A -> B -> A gives the same bits."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.kit.faulty_store import WRITES, Action, Crashed, Fault, FaultyStore
from tests.kit.make_store import (
    TINY,
    Content,
    arange,
    begin,
    llama_state,
    make_store,
    mesh,
    split,
)
from tests.kit.reshards import (
    ODD_ROWS,
    check_reshard,
    contents,
    elements,
    layouts,
    naive,
    opened,
    resharded,
    same_bits,
)

from keepstep.ckpt.arrays import Array
from keepstep.ckpt.diff import diff
from keepstep.ckpt.errors import Corrupt
from keepstep.ckpt.layout import BadLayout, Layout, mesh_of, parse_layout
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Placement
from keepstep.ckpt.region import Box
from keepstep.ckpt.relayout import relayout
from keepstep.ckpt.slabs import slabs
from keepstep.ckpt.structure import HeldTensor, structure_of
from keepstep.ckpt.writer import HELD_BYTES_MAX, TargetTaken, begin_run, write_state
from keepstep.storage.locate import open_store
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

# The property: random tensors and layouts, against the arrays themselves.


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(contents(), layouts)
def test_a_to_b_to_a_is_identity_and_b_equals_the_arrays(content: Content, layout: Layout) -> None:
    check_reshard(content, layout)


@pytest.mark.parametrize("rows", ODD_ROWS)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8"])
def test_uneven_strided_rows_lie_as_a_naive_reader_finds_them(rows: int, dtype: str) -> None:
    array = arange((rows, 3), dtype)
    content = Content(
        {"t": array},
        mesh(pp=1, dp_replicate=1, dp_shard=3, tp=2),
        {"t": split("tp:0", "dp_shard:0")},
    )
    store: Store = MemoryStore()
    make_store(store, content)
    for layout in (Layout(3, 2, 1), Layout(4, 1, 1), Layout(2, 3, 1), Layout(1, 1, 2)):
        store, _ = resharded(store, layout)
        assert naive(store, "t") == elements(array)


# What the trainer will find there.

GRID = [
    Layout(1, 1, 1),
    Layout(2, 1, 1),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    Layout(1, 1, 4),
    Layout(2, 2, 2),
    Layout(4, 1, 2, 2),
    Layout(8, 2, 1, 4),
]


def without_void_splits(placement: Placement, layout: Layout) -> Placement:
    """The same placement without splits over axes of size 1, which cut nothing."""
    sizes = {axis.name: axis.size for axis in mesh_of(layout).axes}
    return Placement(tuple(s for s in placement.splits if sizes[s.axis] > 1), placement.at)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", GRID, ids=str)
def test_placements_are_those_that_the_trainer_gives_in_the_new_layout(
    layout: Layout, tied: bool
) -> None:
    llama = msgspec.structs.replace(TINY, tied=tied)
    for before in GRID:
        store = MemoryStore()
        content = llama_state(before, llama)
        make_store(store, content)
        made = relayout(opened(store).manifest, mesh_of(layout))
        wanted = llama_state(layout, llama).structure()
        for name, spec in made.structure.tensors.items():
            if not name.startswith("rank/"):
                placement = without_void_splits(made.structure.placement(name), layout)
                assert placement == wanted.placement(name), (before, name)
                assert spec.shape == wanted.tensors[name].shape
        assert made.structure.aliases == wanted.aliases
        assert set(made.structure.tensors) - set(wanted.tensors) == set()
        assert bool(made.dropped) == (before != layout)


def test_values_say_the_new_layout_and_nothing_else_changes() -> None:
    store = MemoryStore()
    make_store(store, llama_state(Layout(2, 2, 2), virtual=2))
    target, done = resharded(store, Layout(1, 1, 4))
    before, after = opened(store).manifest.values, opened(target).manifest.values
    assert after["layout"] == {"dp": 1, "tp": 1, "pp": 4, "dp_replicate": 1}
    assert after["pipeline"] == {"stages": [[0], [1], [2], [3]], "virtual": 1}
    parallel = {"dp": 1, "tp": 1, "pp": 4, "dp_replicate": 1, "schedule": "1f1b", "virtual": 1}
    assert after["config"] == before["config"] | {"parallel": parallel}
    rest = set(before) - {"layout", "pipeline", "config"}
    assert {key: after[key] for key in rest} == {key: before[key] for key in rest}
    assert done.dropped == tuple(f"rank/{rank}/rng/cpu" for rank in range(8))


def test_values_of_single_ranks_are_dropped_with_their_tensors() -> None:
    store = MemoryStore()
    content = llama_state(Layout(2, 1, 1))
    content.values["rank/1/sampler"] = 7
    make_store(store, content)
    target, done = resharded(store, Layout(1, 1, 1))
    assert "rank/1/sampler" in done.dropped
    assert "rank/1/sampler" not in opened(target).manifest.values
    assert diff(opened(store), opened(target)).is_same


def test_the_same_layout_keeps_what_belongs_to_ranks() -> None:
    store = MemoryStore()
    content = llama_state(Layout(2, 1, 1))
    make_store(store, content)
    target, done = resharded(store, Layout(2, 1, 1))
    assert done.dropped == ()
    there = opened(target)
    for name, array in content.tensors.items():
        assert same_bits(there.read(name), array), name
    assert there.manifest.values == content.values


def test_the_target_is_a_run_of_the_same_job_that_continues_above_the_source() -> None:
    store = MemoryStore()
    grid = mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    make_store(store, Content({"t": arange((3,))}, grid), steps=(5,), job="mine")
    begin(store, grid, "mine", number=7)
    target, done = resharded(store, Layout(2, 1, 1))
    lineage = Log(target).read()
    assert lineage.job == "mine"
    assert done.state == State(8, 5)
    assert [commit.state for commit in lineage.live] == [done.state]
    parent = lineage.generations[0].parent
    assert parent is not None
    assert (parent.store, parent.job, parent.state) == (store.url, "mine", State(1, 5))
    assert not parent.weights_only


# What cannot be, and what goes wrong.


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        (Layout(1, 3, 1), "heads 4 is no multiple of tp 3"),
        (Layout(1, 4, 1), "kv_heads 2 is no multiple of tp 4"),
        (Layout(1, 1, 5), "4 layers are fewer than the 5"),
        (Layout(3, 1, 1), "global_batch 16 is no multiple of dp 3"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_its_two_numbers(
    layout: Layout, numbers: str
) -> None:
    store, target = MemoryStore(), MemoryStore()
    make_store(store, llama_state(Layout(1, 1, 1)))
    with pytest.raises(BadLayout, match=numbers):
        resharded(store, layout, target)
    assert list(target.list("")) == []


@pytest.mark.parametrize(
    "text",
    ["", "dp", "dp=0", "dp=2,dp=2", "dp=x", "cp=2", "dp=-1", "dp=3,dp_replicate=2", "tp=1e3"],
)
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadLayout, match="layout"):
        parse_layout(text)


def test_layouts_are_read_as_people_write_them() -> None:
    assert parse_layout("dp=4, tp=2,pp=3,dp_replicate=2") == Layout(4, 2, 3, 2)
    assert parse_layout("tp=2") == Layout(1, 2, 1)
    assert str(parse_layout("dp=2,tp=1,pp=1")) == "dp=2,tp=1,pp=1"


def test_a_target_that_holds_anything_is_refused() -> None:
    store = MemoryStore()
    make_store(store, llama_state(Layout(1, 1, 1)))
    with pytest.raises(TargetTaken, match="already holds a run"):
        resharded(store, Layout(2, 1, 1), store)
    foreign = MemoryStore()
    foreign.put("thesis.txt", b"years of work")
    with pytest.raises(TargetTaken, match=r"it has thesis\.txt"):
        resharded(store, Layout(2, 1, 1), foreign)
    begun = MemoryStore()
    begin(begun, mesh(dp=1))
    with pytest.raises(TargetTaken, match="already holds a run of job 'kit'"):
        resharded(store, Layout(2, 1, 1), begun)


def test_a_damaged_source_is_named_and_nothing_is_committed() -> None:
    store, target = MemoryStore(), MemoryStore()
    make_store(store, llama_state(Layout(2, 1, 1)))
    key = next(
        info.key for info in store.list("states/") if info.key.endswith("r00001.safetensors")
    )
    raw = bytearray(store.get(key, 1 << 30))
    raw[-1] ^= 1
    store.put(key, bytes(raw))
    with pytest.raises(Corrupt) as caught:
        resharded(store, Layout(1, 1, 1), target)
    assert caught.value.file == key
    assert Log(target).read().live == ()


@pytest.mark.parametrize("action", [Action.CRASH_BEFORE, Action.CRASH_AFTER])
def test_killed_at_any_write_it_shows_no_commit_or_all_and_can_be_done_in_any_layout(
    action: Action,
) -> None:
    store = MemoryStore()
    content = llama_state(Layout(1, 1, 1), msgspec.structs.replace(TINY, layers=2))
    make_store(store, content)
    for number in itertools.count():
        target = MemoryStore()
        try:
            resharded(
                store,
                Layout(2, 1, 2),
                FaultyStore(target, Fault(action, number, operations=WRITES)),
            )
        except Crashed:
            if not Log(target).read().live:
                resharded(store, Layout(1, 2, 1), target)
            there = opened(target)
            assert all(same_bits(there.read(n), content.tensors[n]) for n in there.manifest.tensors)
        else:
            break
    assert number == 4 + 4  # four images; term, generation, manifest, commit


def test_an_image_beyond_what_is_held_streams_within_bounded_memory(tmp_path: Path) -> None:
    rows = (HELD_BYTES_MAX + (32 << 20)) // 4096
    grid = mesh_of(Layout(1, 1, 1))
    held = {"t": HeldTensor((rows, 1024), "F32", Placement())}
    source = open_store(tmp_path / "source", create=True)
    log, number = begin_run(
        source, job="kit", above=0, mesh=grid, parent=None, config={}, by="a test"
    )

    def pieces(name: str, box: Box) -> Iterator[Array]:
        for part in slabs(box, 4):
            yield np.full(part.sizes, part.offsets[0], np.float32)

    write_state(log, "kit", State(number, 1), structure_of(grid, held, {}), {}, pieces, id)
    target = open_store(tmp_path / "target", create=True)
    tracemalloc.start()
    resharded(source, Layout(1, 1, 1), target)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20
    for box, array in opened(target).pieces("t"):
        assert (array == box.offsets[0]).all()

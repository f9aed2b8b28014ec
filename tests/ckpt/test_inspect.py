"""What ls and show know: rows, layouts, placements, norms against numpy's own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.kit.checkpoints import TENSORS, begin, save, write_images
from tests.kit.logs import (
    MESH,
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
from tests.kit.make_store import Content, arange, make_store, mesh, split

from keepstep.ckpt.address import find_live, find_present, parse_address
from keepstep.ckpt.errors import Corrupt, NoSuchState
from keepstep.ckpt.inspect import (
    Norms,
    checkpoint_rows,
    groups,
    layout_text,
    norms,
    placement_text,
    tensor_rows,
    what_else_is_there,
)
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.lineage import Lineage, Status, fold
from keepstep.ckpt.placement import Mesh, MeshAxis, Pin, Placement, Split
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store


def opened(store: Store) -> CheckpointReader:
    return open_checkpoint(store, open_log(store, job=None).read().live[0])


def test_rows_are_newest_first_without_the_retired() -> None:
    log = [term(1), generation(1), commit(1, 10), commit(1, 20), commit(1, 30), commit(1, 40)]
    lineage = fold(records([*log, good(1, 20), bad(1, 40), retire(state(1, 10))]))
    rows = checkpoint_rows(lineage)
    assert [(row.commit.state.step, row.verdict) for row in rows] == [
        (40, "bad"),
        (30, ""),
        (20, "good"),
    ]
    assert {row.mesh for row in rows} == {MESH}


def test_groups_add_up() -> None:
    store = MemoryStore()
    begin(store, 10)
    found = groups(opened(store).manifest)
    assert [(each.name, each.tensors, each.elements) for each in found] == [
        ("model", 3, 16 + 7 * 24 + 5 * 3),
        ("optimizer", 1, 1),
    ]
    assert sum(each.size_bytes for each in found) == 4 * (16 + 7 * 24) + 2 * 15 + 8


def test_tensors_are_found_by_glob_and_by_alias() -> None:
    store = MemoryStore()
    begin(store, 10)
    reader = opened(store)
    assert [row.name for row in tensor_rows(reader)] == sorted(TENSORS)
    assert [row.name for row in tensor_rows(reader, ["model/w*"])] == [
        "model/wk.weight",
        "model/wq.weight",
    ]
    by_alias = list(tensor_rows(reader, ["*output*", "nothing*"]))
    assert [row.name for row in by_alias] == ["model/norm.weight"]
    assert by_alias[0].aliases == ("model/output.weight",)
    assert all(row.norms is None for row in by_alias)


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int32],
)
def test_norms_are_numpys_whatever_the_layout(dtype: type) -> None:
    """Over the union of owned boxes: split on two axes, uneven, replicated, 0-d, empty."""
    seed = np.random.default_rng(7)
    tensors = {
        "a": (seed.standard_normal((7, 13)) * 4).astype(dtype),
        "b": (seed.standard_normal((5,)) * 4).astype(dtype),
        "c": np.asarray(3).astype(dtype),
        "d": np.zeros((0, 4)).astype(dtype),
    }
    store = MemoryStore()
    placements = {"a": split("tp:0", "dp_shard:0")}
    make_store(store, Content(tensors, mesh(dp_shard=3, tp=2), placements))
    reader = opened(store)
    for name, array in tensors.items():
        values = array.astype(np.float64)
        found = norms(reader, name)
        assert found.l2 == pytest.approx(float(np.sqrt((values**2).sum())), rel=1e-12)
        assert found.abs_max == (float(np.abs(values).max()) if values.size else 0.0)
        assert found.not_finite == 0


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    tensors = {"a": np.array([3.0, np.nan, -4.0, np.inf, -np.inf], dtype=np.float32)}
    store = MemoryStore()
    make_store(store, Content(tensors, mesh(dp_shard=2), {"a": split("dp_shard:0")}))
    assert norms(opened(store), "a") == Norms(l2=5.0, abs_max=4.0, not_finite=3)


def test_complex_norms_are_those_of_the_absolute_values() -> None:
    tensors = {"a": np.array([3 + 4j, 0], dtype=np.complex64)}
    store = MemoryStore()
    make_store(store, Content(tensors, mesh(dp_shard=2)))
    assert norms(opened(store), "a") == Norms(l2=5.0, abs_max=5.0, not_finite=0)


def test_norms_of_damaged_bytes_are_refused() -> None:
    store = MemoryStore()
    make_store(store, Content({"a": arange((8, 8))}, mesh(dp_shard=2)))
    reader = opened(store)
    key = image_key(reader.manifest.state, 0)
    data = bytearray(store.get(key, 1 << 20))
    data[-1] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(Corrupt, match=r"r00000\.safetensors"):
        list(tensor_rows(reader, with_norms=True))


def test_layouts_and_placements_are_written_for_people() -> None:
    full = mesh(pp=2, dp_replicate=2, dp_shard=1, tp=4)
    assert layout_text(full) == "dp=2,tp=4,pp=2,dp_replicate=2"
    assert layout_text(Mesh((MeshAxis("x", 3), MeshAxis("y", 1)))) == "x=3"
    assert layout_text(Mesh((MeshAxis("x", 1),))) == "x=1"
    assert layout_text(None) == "unknown"
    placed = Placement(splits=(Split("tp", 0), Split("dp_shard", 1)), at=(Pin("pp", (0, 3)),))
    assert placement_text(placed) == "tp:0 dp_shard:1 at pp=0,3"
    assert placement_text(Placement()) == "replicated"


def holding(*keys: str) -> str | None:
    store = MemoryStore()
    for key in keys:
        store.put(key, b"x")
    return what_else_is_there(store)


def test_what_lies_where_no_log_is_gets_a_name() -> None:
    assert holding() is None
    hf = holding("config.json", "model-00001-of-00002.safetensors")
    assert hf is not None
    assert "Hugging Face" in hf
    assert holding("pytorch_model.bin") == "what looks like pickled files"
    assert "run directory" in str(holding("metrics.jsonl", "store/log/000000/000000000"))
    assert "no log" in str(holding("states/g000001/s000000000010/manifest.json"))
    assert holding("a", "b", "c", "d") == "files that are not of this format: a, b, c and 1 more"


@pytest.mark.parametrize(
    ("text", "store", "step"),
    [
        ("runs/a/store", "runs/a/store", None),
        ("runs/a/store@120", "runs/a/store", 120),
        ("runs/a/store@latest", "runs/a/store", None),
        ("runs/a@b/store", "runs/a@b/store", None),
        ("runs/a@b@7", "runs/a@b", 7),
        ("file:///data/run@0", "file:///data/run", 0),
        ("@7", "@7", None),
        ("runs/a@1234567890123", "runs/a@1234567890123", None),
        ("runs/a@-1", "runs/a@-1", None),
        ("runs/a@٣", "runs/a@٣", None),
    ],
)
def test_addresses_are_cut_at_the_last_at_sign_before_a_number(
    text: str, store: str, step: int | None
) -> None:
    address = parse_address(text)
    assert (address.store, address.step) == (store, step)


def line() -> Lineage:
    store = MemoryStore()
    log = begin(store, 10, 20, 30)
    log.append(rewind(state(1, 20), "wrong data"))
    log.append(generation(2, state(1, 20)))
    save(log, state(2, 40))
    write_images(store, state(2, 50))
    return log.read()


def test_a_step_is_found_or_its_fate_is_told() -> None:
    lineage = line()
    assert find_live(lineage, None, "S").state == state(2, 40)
    assert find_live(lineage, 20, "S").state == state(1, 20)
    with pytest.raises(NoSuchState, match=r"S has no checkpoint at step 50; it has 40, 20, 10$"):
        find_live(lineage, 50, "S")
    with pytest.raises(NoSuchState, match=r"step 30 of generation 1 is void: rewound to step 20"):
        find_live(lineage, 30, "S")
    assert find_present(lineage, 30, "S").status is Status.VOID
    assert find_present(lineage, None, "S").state == state(2, 40)
    with pytest.raises(NoSuchState):
        find_present(lineage, 50, "S")
    with pytest.raises(NoSuchState, match=r"S has no checkpoint$"):
        find_live(fold([]), None, "S")

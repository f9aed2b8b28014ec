"""A load is a transaction: what does not fit or is damaged changes nothing, and is named."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from tests.kit.states import STATE, Layout, register, save_alone
from torch import nn

from keepstep.ckpt.errors import Corrupt, FormatError, NotRepresentable, StructureMismatch
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.load import Staged, stage
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.restore import Options
from keepstep.ckpt.structure import merge_structures
from keepstep.storage.errors import NotFound
from keepstep.storage.memory import MemoryStore

ONE = Layout()
KEY = image_key(STATE, 0)


class Run:
    """A model with fused AdamW, RNG and a value, registered under the usual names."""

    def __init__(self, seed: int, tied: bool = False, width: int = 300) -> None:
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.embed = nn.Embedding(2 * width, width)
        self.model.output = nn.Linear(width, 2 * width, bias=False)
        if tied:
            self.model.output.weight = self.model.embed.weight
        self.model.norm = nn.BatchNorm1d(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 10, fused=True)
        self.cursor = seed
        self.registry = register(self.model, self.optimizer, ONE, 0)
        self.registry.add_value("cursor", lambda: self.cursor, self._set_cursor)
        self.registry.add_rank_tensor("rng/cpu", torch.get_rng_state, torch.set_rng_state)

    def _set_cursor(self, value: int) -> None:
        self.cursor = value

    def snapshot(self) -> dict[str, list[object]]:
        tensors: dict[str, list[object]] = {
            name: held.read().clone().flatten().tolist()
            for name, held in self.registry.tensors.items()
            if not name.startswith("rank/")
        }
        return tensors | {"values": [self.registry.read_values()]}

    def stage(self, manifest: Manifest, store: MemoryStore, **options: object) -> Staged:
        structure = merge_structures([self.registry.structure()])
        wanted = msgspec.convert(options, Options)
        return stage(self.registry, structure, manifest, store, wanted)

    def load(self, manifest: Manifest, store: MemoryStore, **options: object) -> None:
        with self.stage(manifest, store, **options) as staged:
            staged.apply()


def _saved(run: Run) -> tuple[Manifest, MemoryStore]:
    store = MemoryStore()
    return save_alone(run.registry, store), store


def _damaged(store: MemoryStore, change: Callable[[bytearray], None]) -> None:
    data = bytearray(store.get(KEY, 1 << 30))
    change(data)
    store.put(KEY, bytes(data))


def test_everything_comes_back_values_and_random_numbers_too() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    drawn = torch.randn(3)
    second.load(manifest, store)
    assert torch.equal(torch.randn(3), drawn)
    assert second.snapshot() == first.snapshot()
    assert second.optimizer.param_groups[0]["lr"] == 0.1


def test_tensors_are_filled_in_place_and_ties_hold() -> None:
    first, second = Run(1, tied=True), Run(2, tied=True)
    manifest, store = _saved(first)
    embed = second.model.get_parameter("embed.weight")
    address = embed.data_ptr()
    second.load(manifest, store)
    assert second.model.get_parameter("embed.weight") is embed
    assert embed.data_ptr() == address
    assert second.model.get_parameter("output.weight") is embed
    assert torch.equal(embed, first.model.get_parameter("embed.weight"))
    assert len(manifest.tensors) == len(second.registry.tensors)


def test_one_damaged_byte_of_data_changes_nothing_and_is_named() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    name = "optimizer/output.weight/exp_avg_sq"
    offset = manifest.images[0].size_bytes - 2_000_000

    def flip(data: bytearray) -> None:
        data[offset] ^= 1

    _damaged(store, flip)
    before = second.snapshot()
    with pytest.raises(Corrupt) as caught:
        second.load(manifest, store)
    assert second.snapshot() == before
    error = caught.value
    chunk_start = (
        manifest.images[0].header_bytes
        + (offset - manifest.images[0].header_bytes) // 2**20 * 2**20
    )
    assert (error.file, error.offset) == (KEY, chunk_start)
    assert error.tensor is not None
    assert error.tensor.split("/")[0] in name or error.tensor in str(error)
    assert error.expected != error.found


def test_a_damaged_header_is_found_by_the_manifests_digest() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    before = second.snapshot()
    _damaged(store, lambda data: data.__setitem__(4095, data[4095] ^ 1))
    with pytest.raises(Corrupt, match=r"header.*digest"):
        second.load(manifest, store)
    assert second.snapshot() == before


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda store: store.delete(KEY), NotFound),
        (lambda store: store.put(KEY, store.get(KEY, 1 << 30)[:-1]), FormatError),
        (lambda store: store.put(KEY, store.get(KEY, 1 << 30) + b"\0"), FormatError),
        (lambda store: store.put(KEY, b""), FormatError),
    ],
    ids=["missing", "short", "long", "empty"],
)
def test_a_missing_image_or_one_of_another_size_changes_nothing(
    change: Callable[[MemoryStore], None], kind: type[Exception]
) -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    change(store)
    before = second.snapshot()
    with pytest.raises(kind, match="r00000"):
        second.load(manifest, store)
    assert second.snapshot() == before


def test_a_manifest_without_the_image_is_refused() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    with pytest.raises(FormatError, match="image of rank 0"):
        second.load(msgspec.structs.replace(manifest, images=()), store)


@pytest.mark.parametrize("field", ["job", "plan_digest"])
def test_an_image_of_another_job_or_plan_is_refused(field: str) -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    other = {"job": "other", "plan_digest": "0" * 32}[field]
    before = second.snapshot()
    with pytest.raises(FormatError, match=field.split("_")[0]):
        second.load(msgspec.structs.replace(manifest, **{field: other}), store)
    assert second.snapshot() == before


def test_missing_and_unexpected_tensors_are_refused_with_the_list_unless_allowed() -> None:
    first, second = Run(1), Run(2)
    second.registry.add_tensor("model/new", torch.full((2,), 5.0))
    first.registry.add_tensor("model/old", torch.zeros(2))
    manifest, store = _saved(first)
    before = second.snapshot()
    with pytest.raises(StructureMismatch) as caught:
        second.load(manifest, store)
    assert caught.value.missing == ("model/new",)
    assert caught.value.unexpected == ("model/old",)
    with pytest.raises(StructureMismatch, match="model/new"):
        second.load(manifest, store, allow_unexpected=True)
    with pytest.raises(StructureMismatch, match="model/old"):
        second.load(manifest, store, allow_missing=True)
    assert second.snapshot() == before
    second.load(manifest, store, allow_missing=True, allow_unexpected=True)
    wanted = first.snapshot() | {"model/new": [5.0, 5.0]}
    del wanted["model/old"]
    assert second.snapshot() == wanted


def test_a_change_of_dtype_is_refused_unless_asked_for() -> None:
    store = MemoryStore()
    value = 1.00390625
    registry = Registry(ONE.mesh, 0)
    registry.add_tensor("w", torch.full((70_000,), value))
    registry.add_tensor("small", torch.full((2,), value))
    manifest = save_alone(registry, store)
    target, small = torch.zeros(70_000, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)
    other = Registry(ONE.mesh, 0)
    other.add_tensor("w", target)
    other.add_tensor("small", small)
    structure = merge_structures([other.structure()])
    with pytest.raises(StructureMismatch, match="w is BF16 here, F32 there"):
        stage(other, structure, manifest, store)
    with stage(other, structure, manifest, store, Options(allow_dtype_change=True)) as staged:
        staged.apply()
    assert set(target.tolist()) == {1.0}
    assert small.tolist() == [value, value]


def test_another_shape_is_refused_whatever_is_allowed() -> None:
    first, second = Run(1), Run(2, width=7)
    manifest, store = _saved(first)
    with pytest.raises(StructureMismatch, match=r"model/embed.weight has shape \(14, 7\) here"):
        second.load(
            manifest,
            store,
            allow_missing=True,
            allow_unexpected=True,
            allow_dtype_change=True,
        )


def test_a_prefix_loads_these_tensors_and_reads_little_else() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    before = second.snapshot()
    with second.stage(manifest, store, prefixes=("model/",)) as staged:
        assert sum(staged.read_bytes.values()) < 0.6 * manifest.images[0].size_bytes
        staged.apply()
    after, wanted = second.snapshot(), first.snapshot()
    for name in after:
        assert after[name] == (wanted if name.startswith("model/") else before)[name]


def test_what_belongs_to_a_rank_is_left_alone_in_another_mesh() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    names = [name for name in manifest.tensors if name.startswith("rank/")]
    assert names == ["rank/0/rng/cpu"]
    other = Registry(Layout(dp_shard=2).mesh, 0)
    views = []
    for rank in (0, 1):
        one = Registry(Layout(dp_shard=2).mesh, rank)
        one.add_module("model/", second.model)
        one.add_rank_tensor("rng/cpu", torch.get_rng_state, torch.set_rng_state)
        views.append(one.structure())
        other = one if rank == 0 else other
    state = torch.get_rng_state()
    options = Options(prefixes=("model/", "rank/"))
    with stage(other, merge_structures(views), manifest, store, options) as staged:
        staged.apply()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_that_was_resized_after_staging_stops_the_load_before_anything_changes() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    with second.stage(manifest, store) as staged:
        second.model.output = nn.Linear(3, 3, bias=False)
        embed = second.model.get_parameter("embed.weight").clone()
        with pytest.raises(NotRepresentable, match="since registration"):
            staged.apply()
    assert torch.equal(second.model.get_parameter("embed.weight"), embed)
    assert second.cursor == 2


def test_groups_that_do_not_fit_are_refused_before_anything_changes() -> None:
    first, second = Run(1), Run(2)
    manifest, store = _saved(first)
    second.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    before = second.cursor
    with pytest.raises(StructureMismatch, match="1 parameter groups, the optimizer 2"):
        second.load(manifest, store)
    assert second.cursor == before


def test_state_that_an_optimizer_makes_lazily_is_made_for_the_load() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Registry]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, register(model, optimizer, ONE, 0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer, registry = make()
    step(model, optimizer)
    assert registry.refresh()
    store = MemoryStore()
    manifest = save_alone(registry, store)
    other, other_optimizer, other_registry = make()
    assert other_registry.create_absent(manifest.tensors)
    structure = merge_structures([other_registry.structure()])
    with stage(other_registry, structure, manifest, store) as staged:
        staged.apply()
    step(model, optimizer)
    step(other, other_optimizer)
    assert torch.equal(model.get_parameter("weight"), other.get_parameter("weight"))

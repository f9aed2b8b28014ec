"""Saved in one layout and loaded in another: every bit of parameters and Adam moments is right.

The expected parts are those that torch itself cut from full values, so that neither our arithmetic
nor torch's gathering is the oracle.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kit.ranks import run_ranks
from tests.kit.states import (
    Layout,
    Uneven,
    full_values,
    moments,
    read_manifest,
    register,
    save_together,
    sharded,
)
from torch.distributed.tensor import DTensor

from keepstep.ckpt.agree import gather_structure
from keepstep.ckpt.load import stage
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.structure import merge_structures
from keepstep.storage.file import FileStore

ONE = Layout()
DP2 = Layout(dp_shard=2)
TP2 = Layout(tp=2)
DP2_TP2 = Layout(dp_shard=2, tp=2)
HSDP = Layout(dp_replicate=2, dp_shard=2)
DP3_TP2 = Layout(dp_shard=3, tp=2)


def _save(rank: int, world: int, layout: Layout, root: str) -> None:
    model = sharded(layout)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    registry = register(model, optimizer, layout, rank)
    moments(optimizer)
    save_together(registry, Path(root))


def _load(rank: int, world: int, layout: Layout, root: str) -> list[str]:
    model = sharded(layout)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    registry = register(model, optimizer, layout, rank)
    moments(optimizer)
    expected = _scramble(registry)
    structure = gather_structure(None, registry)
    with stage(registry, structure, read_manifest(Path(root)), FileStore(root)) as staged:
        staged.apply()
    return _differences(registry, expected)


def _scramble(registry: Registry) -> dict[str, torch.Tensor]:
    """The right values of this rank's parts, which are overwritten with others."""
    expected = {}
    for name, held in registry.tensors.items():
        local = held.read()
        expected[name] = local.clone()
        local.fill_(0 if local.dtype == torch.bool else 99)
    return expected


def _differences(registry: Registry, expected: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, held in registry.tensors.items()
        if not torch.equal(held.read(), expected[name])
    ]


def _assert_whole(root: Path) -> None:
    """A single process that never heard of ranks loads the same values."""
    model = Uneven()
    full_values(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    registry = register(model, optimizer, ONE, 0)
    moments(optimizer)
    expected = _scramble(registry)
    structure = merge_structures([registry.structure()])
    with stage(registry, structure, read_manifest(root), FileStore(root)) as staged:
        staged.apply()
    assert _differences(registry, expected) == []
    assert model.counter.item() == 41


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (ONE, DP2),
        (DP2, TP2),
        (TP2, DP2_TP2),
        (DP2_TP2, HSDP),
        (HSDP, DP3_TP2),
        (DP3_TP2, DP2_TP2),
        (DP3_TP2, DP3_TP2),
    ],
    ids=lambda layout: "x".join(map(str, layout.sizes)),
)
def test_a_load_in_another_layout_gives_every_bit(
    saved: Layout, loaded: Layout, tmp_path: Path
) -> None:
    run_ranks(saved.world, _save, saved, str(tmp_path), timeout_s=60)
    _assert_whole(tmp_path)
    differences = run_ranks(loaded.world, _load, loaded, str(tmp_path), timeout_s=60)
    assert differences == [[]] * loaded.world


def _strided_uneven(rank: int, world: int) -> bool:
    model = sharded(DP3_TP2)
    weight = model.get_parameter("up.weight")
    assert isinstance(weight, DTensor)
    return "_StridedShard" in repr(weight.placements) or "StridedShard" in repr(weight.placements)


@pytest.mark.ranks
def test_the_six_rank_layout_has_strided_shards_at_all() -> None:
    assert all(run_ranks(6, _strided_uneven, timeout_s=60))

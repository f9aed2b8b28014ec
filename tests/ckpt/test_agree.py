"""What ranks tell each other: bytes, structures with pipeline stages and ties, and verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kit.ranks import run_ranks
from tests.kit.states import STATE, Layout, read_manifest, save_together
from torch import nn

from keepstep.ckpt.agree import OtherRanksFailed, agree, all_gather_bytes, gather_structure
from keepstep.ckpt.errors import Corrupt, PlanMismatch
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.load import stage
from keepstep.ckpt.placement import Pin
from keepstep.ckpt.registry import Registry
from keepstep.storage.file import FileStore

pytestmark = pytest.mark.ranks

PP2 = Layout(pp=2)


def _gather(rank: int, world: int) -> list[list[bytes]]:
    return [
        all_gather_bytes(None, bytes([rank]) * rank),
        all_gather_bytes(None, b""),
        all_gather_bytes(None, b"same"),
    ]


def test_bytes_of_different_lengths_arrive_in_rank_order() -> None:
    for found in run_ranks(3, _gather):
        assert found == [[b"", b"\1", b"\2\2"], [b""] * 3, [b"same"] * 3]


def _agree(rank: int, world: int, bad: int) -> dict[int, str]:
    try:
        agree(None, "the load", "disk é full" if rank == bad else None)
    except OtherRanksFailed as error:
        return error.problems
    return {}


def test_a_problem_of_one_rank_stops_all() -> None:
    assert run_ranks(2, _agree, 1) == [{1: "disk é full"}] * 2
    assert run_ranks(2, _agree, 9) == [{}, {}]


def _contradict(rank: int, world: int) -> str:
    registry = Registry(Layout(dp_shard=2).mesh, rank)
    registry.add_tensor("a", torch.zeros(3 + rank))
    try:
        gather_structure(None, registry)
    except PlanMismatch as error:
        return str(error)
    return ""


def test_ranks_that_contradict_each_other_all_hear_the_same() -> None:
    first, second = run_ranks(2, _contradict)
    assert first == second
    assert "'a' has shape (3,) on rank 0, but (4,) on rank 1" in first


def _stages(rank: int) -> tuple[nn.Module, Registry]:
    """Two pipeline stages with a tied embedding: the first calls it so, the last `output`."""
    torch.manual_seed(1)
    stage_module = nn.Module()
    if rank == 0:
        stage_module.embed = nn.Embedding(6, 4)
        stage_module.first = nn.Linear(4, 4)
    else:
        stage_module.output = nn.Linear(4, 6, bias=False)
        stage_module.last = nn.Linear(4, 4)
    shared = torch.arange(24.0).view(6, 4)
    tied = stage_module.get_parameter("embed.weight" if rank == 0 else "output.weight")
    with torch.no_grad():
        tied.copy_(shared)
    registry = Registry(PP2.mesh, rank)
    both = [Pin("pp", (0, 1))]
    registry.add_module(
        "model/",
        stage_module,
        at=[Pin("pp", (rank,))],
        at_of={"embed.weight": both},
        same_as={"output.weight": "embed.weight"},
    )
    optimizer = torch.optim.AdamW(stage_module.parameters(), fused=True)
    registry.add_optimizer("optimizer/", optimizer)
    return stage_module, registry


def _save_stages(rank: int, world: int, root: str) -> list[str]:
    stage_module, registry = _stages(rank)
    save_together(registry, Path(root))
    structure = gather_structure(None, registry)
    expected = {name: held.read().clone() for name, held in registry.tensors.items()}
    for held in registry.tensors.values():
        held.read().fill_(9)
    with stage(registry, structure, read_manifest(Path(root)), FileStore(root)) as staged:
        staged.apply()
    del stage_module
    return [n for n, held in registry.tensors.items() if not torch.equal(held.read(), expected[n])]


def test_stages_and_a_tie_across_them_come_back(tmp_path: Path) -> None:
    assert run_ranks(2, _save_stages, str(tmp_path)) == [[], []]
    manifest = read_manifest(tmp_path)
    assert manifest.aliases == {"model/output.weight": "model/embed.weight"}
    assert "model/first.weight" in manifest.tensors
    assert "model/last.weight" in manifest.tensors
    assert "optimizer/embed.weight/exp_avg" in manifest.tensors
    assert not any("output" in name for name in manifest.tensors)


def _one_damaged(rank: int, world: int, root: str) -> tuple[str, bool]:
    _, registry = _stages(rank)
    save_together(registry, Path(root))
    if rank == 0:
        path = Path(root) / image_key(STATE, 1)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    structure = gather_structure(None, registry)
    for held in registry.tensors.values():
        held.read().fill_(9)
    problem, staged = None, None
    try:
        staged = stage(registry, structure, read_manifest(Path(root)), FileStore(root))
    except Corrupt as error:
        problem = str(error)
    try:
        agree(None, "the load", problem)
    except OtherRanksFailed as error:
        untouched = all(bool((held.read() == 9).all()) for held in registry.tensors.values())
        return str(error), untouched
    assert staged is not None
    staged.apply()
    return "", False


def test_damage_that_one_rank_sees_changes_nothing_on_any(tmp_path: Path) -> None:
    (first, kept), (second, kept_too) = run_ranks(2, _one_damaged, str(tmp_path))
    assert (kept, kept_too) == (True, True)
    assert first == second
    assert "rank 1: " in first
    assert "checksum" in first

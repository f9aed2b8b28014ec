"""DTensors as FSDP2 and tensor parallelism leave them: read right at any moment, or refused."""

from __future__ import annotations

import pytest
import torch
from tests.kit.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.placement import Mesh, MeshAxis, Placement, Split
from keepstep.ckpt.registry import Registry

pytestmark = pytest.mark.ranks

TWO = Mesh((MeshAxis("dp_shard", 2), MeshAxis("tp", 1)))
FOUR = Mesh((MeshAxis("dp_shard", 2), MeshAxis("tp", 2)))


def _refusal(registry: Registry, tensor: torch.Tensor) -> str:
    try:
        registry.add_tensor("t", tensor)
    except NotRepresentable as error:
        return str(error)
    return ""


def _refused(rank: int, world: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    nameless = init_device_mesh("cpu", (2,))
    wide = Mesh((MeshAxis("dp_shard", 1), MeshAxis("tp", 2)))
    full = torch.arange(6.0)
    shard = [Shard(0)]
    odd = DTensor.from_local(
        torch.zeros(4 - 2 * rank), mesh, shard, run_check=False, shape=torch.Size((7,)), stride=(1,)
    )
    return {
        "axis": _refusal(Registry(TWO, rank), distribute_tensor(full, other, shard)),
        "nameless": _refusal(Registry(TWO, rank), distribute_tensor(full, nameless, shard)),
        "size": _refusal(Registry(wide, rank), distribute_tensor(full, mesh, shard)),
        "partial": _refusal(
            Registry(TWO, rank), DTensor.from_local(full, mesh, [Partial()], run_check=False)
        ),
        "uneven": _refusal(Registry(TWO, rank), odd),
    }


def test_what_a_placement_cannot_say_is_refused() -> None:
    first, second = run_ranks(2, _refused)
    assert "('data',)" in first["axis"]
    assert "the axes None" in first["nameless"]
    assert "number 1 of 2 along 'dp_shard', on the run's mesh number 0 of 1" in second["size"]
    assert "Partial" in first["partial"]
    assert first["uneven"] == ""  # 4 of 7 rows is what torch.chunk gives the first
    assert "holds (3,), but its local part has shape (2,)" in second["uneven"]


def _orders(rank: int, world: int) -> list[tuple[Placement, tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    found = []
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(-1)], [Shard(1), Shard(0)]):
        registry = Registry(FOUR, rank)
        full = torch.arange(7 * 5).view(7, 5)
        registry.add_tensor("t", distribute_tensor(full, mesh, placements))
        held = registry.tensors["t"]
        box = held.box
        part = full[
            box.offsets[0] : box.offsets[0] + box.sizes[0],
            box.offsets[1] : box.offsets[1] + box.sizes[1],
        ]
        assert torch.equal(held.read(), part)
        found.append((held.tensor.placement, box.sizes))
    return found


def test_the_order_of_cuts_is_that_of_the_mesh_dims() -> None:
    found = run_ranks(4, _orders)
    assert [placement for placement, _ in found[0]] == [
        Placement((Split("dp_shard", 0), Split("tp", 0))),
        Placement((Split("tp", 1),)),
        Placement((Split("tp", 0), Split("dp_shard", 1))),
    ]


def _between_forward_and_backward(rank: int, world: int) -> tuple[bool, list[int], bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = nn.Sequential(nn.Linear(5, 5, bias=False))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    registry = Registry(TWO, rank)
    registry.add_module("", model)
    before = registry.tensors["0.weight"].read().clone()
    model(torch.ones(1, 5))
    shown = model.get_parameter("0.weight")
    part = registry.tensors["0.weight"].read()
    return isinstance(shown, DTensor), list(part.shape), torch.equal(part, before)


def test_a_gathered_parameter_is_still_read_as_its_shard() -> None:
    found = run_ranks(2, _between_forward_and_backward)
    assert found == [(False, [3, 5], True), (False, [2, 5], True)]


def _local_views(rank: int, world: int) -> list[tuple[str, Placement, tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh)
    weight = model.get_parameter("weight")
    assert isinstance(weight, DTensor)
    view = nn.Parameter(weight.to_local().detach())
    optimizer = torch.optim.AdamW([view], fused=True)
    registry = Registry(TWO, rank)
    registry.add_module("model/", model)
    registry.add_optimizer("optimizer/", optimizer, names={view: "weight"})
    return [
        (name, held.tensor.placement, held.tensor.shape)
        for name, held in registry.tensors.items()
        if name.startswith("optimizer/")
    ]


def test_state_of_an_optimizer_over_local_views_lies_like_the_parameter() -> None:
    split = Placement((Split("dp_shard", 0),))
    for found in run_ranks(2, _local_views):
        assert found == [
            ("optimizer/weight/step", Placement(), ()),
            ("optimizer/weight/exp_avg", split, (6, 4)),
            ("optimizer/weight/exp_avg_sq", split, (6, 4)),
        ]

"""Live tensors found anew: cheaply where nothing has changed, rightly where something has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.parts import Part, Parts, is_stable
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.region import Box
from keepstep.ckpt.registry import Registry

ONE = Mesh((MeshAxis("dp", 1),))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.alone = nn.Parameter(torch.arange(6.0))


def _registered() -> tuple[Net, torch.optim.Optimizer, Registry]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    registry = Registry(ONE, 0)
    registry.add_module("model/", net)
    registry.add_optimizer("optimizer/", optimizer)
    registry.add_tensor("constant", torch.ones(2))
    registry.add_rank_tensor("rng", torch.get_rng_state, torch.set_rng_state)
    return net, optimizer, registry


def _all(registry: Registry) -> tuple[list[str], Parts]:
    names = [name for name, held in registry.tensors.items() if is_stable(held)]
    return names, Parts([Part(registry.tensors[name], None) for name in names])


def _check(registry: Registry, names: list[str], parts: Parts) -> None:
    parts.read()
    for name, found in zip(names, parts.tensors, strict=True):
        wanted = registry.tensors[name].read()
        assert found.data_ptr() == wanted.data_ptr(), name
        assert torch.equal(found, wanted), name


def test_what_a_function_makes_is_not_stable() -> None:
    _, _, registry = _registered()
    unstable = [name for name, held in registry.tensors.items() if not is_stable(held)]
    assert unstable == ["rank/0/rng"]


def test_nothing_is_read_anew_while_tensors_only_change_their_values() -> None:
    net, optimizer, registry = _registered()
    names, parts = _all(registry)
    net.inner(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    _check(registry, names, parts)
    assert parts.version == 0


def test_every_way_to_put_another_tensor_in_a_place_is_seen() -> None:
    net, _, registry = _registered()
    names, parts = _all(registry)
    first = net.inner[0]
    assert isinstance(first, nn.Linear)
    changes = {
        "data": lambda: setattr(first.weight, "data", torch.randn(3, 4)),
        "parameter": lambda: setattr(net, "alone", nn.Parameter(torch.randn(6))),
        "module": lambda: net.inner.__setitem__(1, nn.BatchNorm1d(3)),
        "buffer": lambda: net.inner[1].register_buffer("running_mean", torch.randn(3)),
        "swap": lambda: torch.utils.swap_tensors(first.bias, nn.Parameter(torch.randn(3))),
        "set": lambda: first.weight.data.set_(torch.randn(3, 4)),
    }
    for number, (how, change) in enumerate(changes.items(), start=1):
        if how == "swap":  # refuses tensors that something holds on to weakly
            with pytest.raises(RuntimeError, match="weakref"):
                change()
            continue
        change()
        _check(registry, names, parts)
        assert parts.version >= min(number, 4), how


def test_another_state_dict_of_the_optimizer_is_seen() -> None:
    _, optimizer, registry = _registered()
    names, parts = _all(registry)
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        state["exp_avg"] = torch.randn_like(state["exp_avg"])
    _check(registry, names, parts)
    assert parts.version == 1


def test_parts_of_a_tensor_follow_it_to_other_memory() -> None:
    net, _, registry = _registered()
    parts = Parts([Part(registry.tensors["model/alone"], Box((2,), (3,)))])
    assert parts.tensors[0].tolist() == [2.0, 3.0, 4.0]
    net.alone.data = torch.arange(10.0, 16.0)
    parts.read()
    assert parts.tensors[0].tolist() == [12.0, 13.0, 14.0]


def test_a_tensor_that_is_another_kind_of_thing_now_is_named() -> None:
    net, _, registry = _registered()
    _, parts = _all(registry)
    net.alone = nn.Parameter(torch.randn(7))
    with pytest.raises(NotRepresentable, match=r"model/alone.*\(6,\).*\(7,\)"):
        parts.read()
    del net.alone
    with pytest.raises(NotRepresentable, match="no such tensor any more"):
        parts.read()

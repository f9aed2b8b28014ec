"""FSDP2 (and TP) linear layers with Adam: the state that is saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.registry import Registry

WIDTH = 1024
_STATE_BYTES = 3 * 4  # of one weight: itself and two moments, in float32


class Trained:
    """A model and its optimizer after one step, in one layout.

    Args:
        dp, tp: sizes of the layout.
        total_bytes: of the state, all ranks together, about.
        seed: of the weights.

    Attributes:
        bytes_per_rank: what this rank holds of the state.
        optimizer: whose `step` does nothing but call its hooks: there are no gradients.
    """

    def __init__(self, dp: int, tp: int, total_bytes: int, seed: int) -> None:
        torch.manual_seed(seed)
        layers = max(2, total_bytes // (_STATE_BYTES * WIDTH * WIDTH))
        self._sizes = (dp, tp)
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        self._model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        if tp > 1:
            for index, layer in enumerate(self._model):
                style = RowwiseParallel() if index % 2 else ColwiseParallel()
                parallelize_module(layer, mesh["tp"], style)
        for layer in self._model:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self._model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        for parameter in self._model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights, moments = get_state_dict(self._model, self.optimizer)
        self.state: dict[str, Any] = {"model": weights, "optimizer": moments}
        self.bytes_per_rank = _local_bytes(self.state)

    def registry(self, rank: int) -> Registry:
        """Ours, with everything registered."""
        dp, tp = self._sizes
        registry = Registry(Mesh((MeshAxis("dp", dp), MeshAxis("tp", tp))), rank)
        registry.add_module("model/", self._model)
        registry.add_optimizer("optimizer/", self.optimizer)
        registry.add_rank_tensor("rng/cpu", torch.get_rng_state, torch.set_rng_state)
        return registry

    def sum(self) -> float:
        """Of all weights on this rank: to see that they came back."""
        locals_ = (_local(parameter.detach()) for parameter in self._model.parameters())
        return float(sum(one.double().sum() for one in locals_))

    def spoil(self) -> None:
        """Set all weights to zero."""
        for parameter in self._model.parameters():
            _local(parameter.detach()).zero_()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_bytes(value: object) -> int:
    if isinstance(value, dict):
        return sum(_local_bytes(item) for item in value.values())
    return _local(value).nbytes if isinstance(value, torch.Tensor) else 0

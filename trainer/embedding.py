"""The embedding with its rows split over tp, giving the stream split over positions."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class VocabParallelEmbedding(ParallelStyle):
    """Each rank looks up the tokens of its rows; a reduce-scatter adds up and splits positions.

    torch's RowwiseParallel does the same forward, but its backward makes the gradient of all rows
    on every rank, marked as replicated (torch 2.13); here each rank makes that of its own rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distributed = distribute_module(module, device_mesh, _split_rows)
        distributed.forward = partial(_look_up, distributed, device_mesh)
        return distributed


def _split_rows(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        rows = nn.Parameter(distribute_tensor(param, mesh, [Shard(0)]))
        module.register_parameter(name, rows)


def _look_up(module: nn.Module, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
    """Tokens [B, S] -> this rank's positions of the stream [B, S / tp, D]."""
    weight = module.weight
    rows = weight.to_local() if isinstance(weight, DTensor) else weight
    assert isinstance(rows, Tensor)
    index = tokens - mesh.get_local_rank() * rows.shape[0]
    mine = (index >= 0) & (index < rows.shape[0])
    found = F.embedding(torch.where(mine, index, 0), rows)
    found = torch.where(mine.unsqueeze(-1), found, 0.0)
    stream = DTensor.from_local(found, mesh, [Partial()], run_check=False)
    return stream.redistribute(placements=[Shard(1)]).to_local()

"""Initial weights: a function of (seed, parameter name), the same in every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.trainer.model_config import ModelConfig

_STD = 0.02


def initial_weight(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The whole tensor `name` in fp32 on the CPU.

    Norms are ones; matrices are normal with standard deviation 0.02, those that write to the
    residual stream less by sqrt(2 layers) (GPT-2's rule). A tied output takes the embedding's.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name == "output.weight" and config.tied:
        name = "tok_embeddings.weight"
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    residual = name.endswith((".wo.weight", ".w2.weight"))
    std = _STD / math.sqrt(2 * config.layers) if residual else _STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def local_part(whole: Tensor, param: Tensor) -> Tensor:
    """This rank's part of `whole` under the placements of `param` (all of it for a plain tensor).

    Splits along a dim are taken innermost axis first where torch says so (_StridedShard: tp before
    dp), each by torch.chunk's rule.
    """
    if not isinstance(param, DTensor):
        return whole
    mesh, strided, plain = param.device_mesh, [], []
    for axis, placement in enumerate(param.placements):
        coordinate = mesh.get_local_rank(axis)
        size = mesh.size(axis)
        if isinstance(placement, _StridedShard):
            strided.append((placement.dim, size, coordinate))
        elif isinstance(placement, Shard):
            plain.append((placement.dim, size, coordinate))
        elif not isinstance(placement, Replicate):
            raise TypeError(f"a parameter cannot be placed as {placement}")
    for dim, size, coordinate in plain + strided:
        step = -(-whole.shape[dim] // size)
        start = min(step * coordinate, whole.shape[dim])
        whole = whole.narrow(dim, start, min(step, whole.shape[dim] - start))
    return whole


@torch.no_grad()
def initialize(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill this rank's part of every parameter of `module`, one whole tensor at a time."""
    for name, param in module.named_parameters():
        part = local_part(initial_weight(name, param.shape, config, seed), param)
        local = param.to_local() if isinstance(param, DTensor) else param
        local.copy_(part)

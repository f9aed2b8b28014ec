"""Sums that only a view over all axes gets right: norm weights' gradients, and the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from keepstep.trainer.layout import Coordinates


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_norm_gradients(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum norm weights' gradients (local shards) over tp, in place, with one all-reduce.

    Each tp rank saw only its part of the sequence. Afterwards the gradients of norm weights are
    equal on all tp ranks.
    """
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [g.numel() for g in gradients])
    torch._foreach_copy_(
        list(gradients), [p.view_as(g) for p, g in zip(parts, gradients, strict=True)]
    )


def counts_here(param: Tensor, place: Coordinates) -> bool:
    """Whether this rank adds its part of `param` to the global norm.

    An axis that splits the parameter adds all its parts; an axis that replicates it adds one.
    """
    split: set[str] = set()
    if isinstance(param, DTensor):
        names = param.device_mesh.mesh_dim_names or ()
        split = {n for n, p in zip(names, param.placements, strict=True) if not p.is_replicate()}
    return all(
        axis in split or getattr(place, axis) == 0 for axis in ("dp_replicate", "dp_shard", "tp")
    )


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of local gradients, 0-d fp64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()


def clip_(gradients: Iterable[Tensor], norm: Tensor, most: float) -> None:
    """Scale local gradients in place so that the global norm is at most `most` (0: no limit)."""
    if most <= 0:
        return
    factor = (most / norm).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, same in by_dtype.items():
        torch._foreach_mul_(same, factor.to(dtype))

"""Sums that only a view over all axes gets right: norm weights' gradients, and the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from keepstep.trainer.layout import Coordinates


class GradientPlacementError(RuntimeError):
    """A gradient lies over the mesh otherwise than its parameter."""


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient; None if there is no gradient.

    Raises:
        GradientPlacementError: the gradient lies otherwise than the parameter, so that its local
            part is no part of the sum (torch leaves partial or replicated gradients silently).
    """
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return grad
    if grad.placements != param.placements:
        raise GradientPlacementError(
            f"a parameter of shape {tuple(param.shape)} is placed as {param.placements} and its"
            f" gradient as {grad.placements}; the parallel plan must make them the same"
        )
    return grad.to_local()


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
    """Scale local gradients in place so that the global norm is at most `most` (0: no limit).

    The factor is min(1, most / (norm + 1e-6)), as torch's clip_grad_norm_ has it.
    """
    if most <= 0:
        return
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, same in by_dtype.items():
        torch._foreach_mul_(same, factor.to(dtype))

"""Cross-entropy over logits whose vocabulary is split over the tp axis, without gathering them.

The loss of a step is a sum over the valid tokens of all ranks divided by their number: each rank
and micro-batch gives its sum, and the number is agreed on before the first backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from keepstep.trainer.model_config import IGNORED


def loss_sum(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of cross-entropies of the valid tokens, in fp32 (fp64 for fp64 logits).

    logits [B, S, V / tp]: this rank's part of the vocabulary; labels [B, S] hold global token
    numbers or IGNORED. `group`: the tp group, None for one rank. The result is the same on all
    ranks of the group. Two all-reduces: of the maximum, and of (sum of exponentials, target).
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits.flatten(0, -2).to(dtype)
    if group is None:
        return F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss: Tensor = _VocabParallel.apply(rows, labels.flatten(), group)  # type: ignore[no-untyped-call]
    return loss


def count_valid(labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Valid labels over all ranks of `group` (the dp axes; None: this rank's), 0-d int64."""
    count = (labels != IGNORED).sum()
    if group is not None:
        dist.all_reduce(count, group=group)
    return count


class _VocabParallel(torch.autograd.Function):
    """rows [N, V / tp], labels [N] -> 0-d sum. The gradient is local: softmax less one-hot."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch gives its context no public type
        rows: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        width = rows.shape[-1]
        start = width * dist.get_rank(group)
        valid = labels != IGNORED
        mine = valid & (labels >= start) & (labels < start + width)
        index = torch.where(mine, labels - start, 0).unsqueeze(-1)
        highest = rows.amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = rows - highest.unsqueeze(-1)
        target = torch.where(mine, shifted.gather(-1, index).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), target))
        dist.all_reduce(sums, group=group)
        probabilities = exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(probabilities, index, mine, valid)
        return torch.where(valid, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        probabilities, index, mine, valid = ctx.saved_tensors
        scale = grad * valid.unsqueeze(-1)
        rows = probabilities * scale
        return rows.scatter_add_(-1, index, -scale * mine.unsqueeze(-1)), None, None

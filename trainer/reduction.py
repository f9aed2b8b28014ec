"""A few numbers reduced over all ranks at once, each by its own operation.

Each axis in turn gathers its peers' numbers, and every rank folds them in the same order: so all
ranks hold the same bits, and sums, least and largest values share one message per axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Operation = Literal["sum", "min", "max"]
Entry = tuple[Operation, float]


def reduce_entries(
    values: Tensor, operations: Sequence[Operation], axes: Sequence[tuple[str, dist.ProcessGroup]]
) -> Tensor:
    """Reduce values [K] (fp64, on the device) over the ranks of all `axes`.

    All ranks give the same operations. NaN wins in every operation.
    """
    for _, group in axes:
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values, group=group)
        values = _fold(torch.stack(gathered), operations)
    return values


def reduction_bytes(count: int, axes: Sequence[tuple[str, dist.ProcessGroup]]) -> dict[str, int]:
    """Bytes that this rank sends per axis to reduce `count` numbers: known before they are sent."""
    return {axis: (group.size() - 1) * count * 8 for axis, group in axes}


def _fold(rows: Tensor, operations: Sequence[Operation]) -> Tensor:
    folded = {"sum": rows.sum(0), "min": rows.amin(0), "max": rows.amax(0)}
    return torch.stack([folded[operation][k] for k, operation in enumerate(operations)])

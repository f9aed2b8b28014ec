"""The tied pair across a pipeline: two equal weights on the first and the last stage.

Both start from the same values, get the same gradient (the sum of both) and take the same update,
so they stay equal bit by bit. The sum is taken after fsdp's reduction: both ends have the same tp
and dp coordinates, hence the same shard, so whole gradients are added, not partial sums.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from keepstep.trainer.mesh import Grid


def ends_group(grid: Grid) -> dist.ProcessGroup | None:
    """The group of this rank's first- and last-stage counterparts; None on the stages between.

    Collective over the ranks of each pipeline's two ends; to be called once.
    """
    pp = grid.parallel.pp
    if pp == 2:
        return grid.group("pp")
    if grid.place.pp not in (0, pp - 1):
        return None
    ranks = dist.get_process_group_ranks(grid.group("pp"))
    group: dist.ProcessGroup = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
    return group


def sum_gradients(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Add the other end's gradient of the tied weight, in place (local shard).

    Afterwards the gradient is bitwise equal on both ends: a + b = b + a.
    """
    dist.all_reduce(gradient, group=group)

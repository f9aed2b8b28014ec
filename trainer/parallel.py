"""The recipe that lays one stage over the mesh: tp with sp, checkpointing, fsdp; in this order.

Every matrix is a DTensor where tp > 1 and where fsdp is applied. Norm weights are whole on every
tp rank (no DTensor on the tp axis) and see only their part of the sequence, so that their gradients
must be summed over tp once per step: `norm.sum_norm_gradients`.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from keepstep.trainer.embedding import VocabParallelEmbedding
from keepstep.trainer.mesh import Grid
from keepstep.trainer.model import Llama
from keepstep.trainer.model_config import Dtype, NumericsConfig

MASTER_DTYPE: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.float32,
}
COMPUTE_DTYPE: dict[Dtype, torch.dtype] = {**MASTER_DTYPE, "bf16": torch.bfloat16}


def uses_fsdp(config: NumericsConfig) -> bool:
    """Whether parameters are wrapped: for dp, or because bf16 compute needs its casts."""
    return config.parallel.dp > 1 or config.dtype == "bf16"


def lay_out(stage: Llama, grid: Grid, config: NumericsConfig) -> None:
    """Distribute a stage's parameters (still on the meta device) and the work on them."""
    if config.parallel.tp > 1:
        parallelize_module(stage, grid.tp, _tp_plan(stage))
        stage.tie()
    if config.activation_checkpointing:
        for block in stage.layers.values():
            # On the instance, inside fsdp's hooks: names stay, recomputing gathers nothing anew.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if uses_fsdp(config):
        _shard(stage, grid, config)


def _tp_plan(stage: Llama) -> dict[str, ParallelStyle]:
    """Between blocks the stream is split over positions (dim 1); inside them over heads or ffn."""
    plan: dict[str, ParallelStyle] = {}
    for i in stage.layers:
        for part, columns, row in (
            ("attention", ("wq", "wk", "wv"), "wo"),
            ("feed_forward", ("w1", "w3"), "w2"),
        ):
            prefix = f"layers.{i}.{part}"
            plan[prefix] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            plan.update({f"{prefix}.{column}": ColwiseParallel() for column in columns})
            plan[f"{prefix}.{row}"] = RowwiseParallel(output_layouts=Shard(1))
    if stage.tok_embeddings is not None:
        plan["tok_embeddings"] = VocabParallelEmbedding()
    if stage.output is not None:
        plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))
    return plan


def _shard(stage: Llama, grid: Grid, config: NumericsConfig) -> None:
    master = MASTER_DTYPE[config.dtype]
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE[config.dtype], reduce_dtype=master)
    # Under a pipeline parameters stay gathered from the first forward to the last backward:
    # gathering them for each micro-batch costs more, and split backwards would be silently wrong.
    reshard = config.parallel.pp == 1
    if config.parallel.tp > 1:
        # True of the last stage's logits (DTensor.to_local is a view); nobody writes to them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in stage.layers.values():
        fully_shard(block, mesh=grid.fsdp, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(stage, mesh=grid.fsdp, reshard_after_forward=False, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums: the loss was divided by the number of tokens of all ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

"""The bytes that the built-in trainer's step sends, axis by axis, as its own meter counts them.

`comm.step_bytes` is the textbook's minimum per GPU; this is every collective of one concrete
trainer, summed over all ranks: ring formulae, fully sharded weights (gathered twice per micro
batch, once per step under a pipeline), sequence parallelism, norms and ties summed apart, and one
small reduction of a few numbers over each axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from keepstep.planner.layout import Layout
from keepstep.planner.model import ModelConfig

COUNT_BYTES = 8  # of an int64 or fp64 number
STEP_NUMBERS = 5  # loss, squared norm, and the bytes of three axes


@dataclass(frozen=True)
class Widths:
    """Bytes of an element as it is sent: weights and activations, gradients, loss terms."""

    element: int = 4
    gradient: int = 4
    scalar: int = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes per step, summed over all ranks."""

    dp: int
    tp: int
    pp: int


def trainer_traffic(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    widths: Widths | None = None,
    extra_numbers: int = 0,
) -> Traffic:
    """Bytes of one step. `extra_numbers` ride on the step's reduction (the job's own flags)."""
    sent = widths or Widths()
    numbers = (STEP_NUMBERS + extra_numbers) * COUNT_BYTES * layout.gpus
    return Traffic(
        dp=_data(model, layout, global_batch, sent) + (layout.dp - 1) * numbers,
        tp=_tensor(model, layout, global_batch, sent) + (layout.tp - 1) * numbers,
        pp=_pipeline(model, layout, global_batch, sent) + (layout.pp - 1) * numbers,
    )


def _data(model: ModelConfig, layout: Layout, global_batch: int, sent: Widths) -> int:
    """Sharded weights and gradients, replicas' sums, and the count of valid tokens."""
    if layout.dp == 1:
        return 0
    count = layout.micro_batches(global_batch)
    shard, replicas = layout.dp_shard, layout.dp_replicate
    block = model.layers * _padded(block_rows(model, layout.tp), shard) * layout.tp
    root = _padded(root_rows(model, layout), shard) * layout.tp
    gathers = (2 * count * block + count * root) if layout.pp == 1 else block + root
    weights = (shard - 1) * replicas * gathers * sent.element
    gradients = (block + root) * sent.gradient
    scattered = (shard - 1) * replicas * gradients + 2 * (replicas - 1) * gradients
    counted = layout.tp * layout.pp * 2 * (layout.dp - 1) * COUNT_BYTES
    return weights + scattered + counted


def block_rows(model: ModelConfig, tp: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each tensor of a block on one tp rank; rows are what dp cuts."""
    kv, ffn = model.kv_dim // tp, model.ffn_dim // tp
    return (
        (model.dim // tp, model.dim),
        (kv, model.dim),
        (kv, model.dim),
        (model.dim, model.dim // tp),
        (ffn, model.dim),
        (ffn, model.dim),
        (model.dim, ffn),
        (model.dim, 1),
        (model.dim, 1),
    )


def root_rows(model: ModelConfig, layout: Layout) -> tuple[tuple[int, int], ...]:
    """The same of what is outside the blocks: embedding, output and the last norm."""
    ends = 1 if model.tied and layout.pp == 1 else 2
    return ((model.vocab_size // layout.tp, model.dim),) * ends + ((model.dim, 1),)


def _padded(rows: tuple[tuple[int, int], ...], shard: int) -> int:
    """Elements with each tensor's rows filled up to a multiple of the shards."""
    return sum(ceil(height / shard) * shard * width for height, width in rows)


def _tensor(model: ModelConfig, layout: Layout, global_batch: int, sent: Widths) -> int:
    """Streams gathered and scattered, three numbers per token for the loss, norms' gradients.

    A block has four collectives each way. Doing it again stops before the last, whose result
    nothing needs.
    """
    around = layout.tp - 1
    tokens = global_batch * model.seq_len
    stream = tokens * model.dim * sent.element
    each = 11 if layout.recompute == "full" else 8
    loss = 3 * 2 * tokens * sent.scalar
    norms = 2 * (2 * model.layers + 1) * model.dim * sent.gradient * layout.dp_replicate
    return around * ((each * model.layers + 4) * stream + loss + norms)


def _pipeline(model: ModelConfig, layout: Layout, global_batch: int, sent: Widths) -> int:
    """Activations and their gradients over each boundary, and the tied pair's gradient."""
    if layout.pp == 1:
        return 0
    stream = global_batch * model.seq_len * model.dim * sent.element
    boundaries = layout.pp * layout.virtual - 1
    tied = 2 * model.embedding_params * sent.gradient * layout.dp_replicate if model.tied else 0
    return 2 * boundaries * stream + tied

"""Bytes on the fullest GPU, and of a host's snapshot arenas.

Sources: Korthikanti et al. 2022 (activations per layer), ZeRO (states per parameter).
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.planner.cluster import GIB, Cluster
from keepstep.planner.comm import WEIGHT_BYTES
from keepstep.planner.cost import stage_layers
from keepstep.planner.layout import Layout
from keepstep.planner.model import ModelConfig
from keepstep.planner.stack import MODERN, Stack

OPTIMIZER_STATE_BYTES = 12
"""Per parameter: fp32 weight, exp_avg, exp_avg_sq. Also what a snapshot holds of it."""

RESERVED_BYTES = 3.0 * GIB
"""What the driver and the communicators take: an assumption."""

USABLE = 0.95
"""Of the GPU's memory; the allocator's gaps take the rest: an assumption."""

OWN_SLOTS = 3
PEER_SLOTS = 3


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU, and of the arenas in one host's memory."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    arenas_per_host: float

    @property
    def total(self) -> float:
        """All on the GPU."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers


def layer_activation_bytes(model: ModelConfig, layout: Layout, flash: bool) -> float:
    """What one layer keeps of one micro batch until its backward.

    full: its input, 2sbh. core attention, GPT: sbh (10 + 24/t + 5as/ht), with sequence parallel
    all of it over t, with selective recompute without the 5as/h term. flash: inputs and outputs
    of the two norms, 8sbh; and over t: queries, keys, values, attention's output and three MLP
    widths (two and dropout-free for a plain MLP).
    """
    tokens = layout.micro_batch * model.seq_len
    spread = layout.tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return 2.0 * tokens * model.dim / spread
    if flash:
        mlp = (3 if model.gated else 2) * model.ffn_dim
        cut = 2.0 * (2 * model.dim + 2 * model.kv_dim + mlp)
        return tokens * (8.0 * model.dim / spread + cut / layout.tp)
    scores = 0.0 if layout.recompute == "selective" else 5.0 * model.heads * model.seq_len
    inner = 24.0 * model.dim + scores
    return tokens * (10.0 * model.dim / spread + inner / layout.tp)


def micro_batches_held(layout: Layout, count: int) -> float:
    """Micro batches whose activations the first stage holds, in units of a whole rank's layers.

    1F1B: min(m, p). Interleaved: p (1 + (p-1)/(pv)), Korthikanti's figure for the first stage.
    """
    held = float(min(count, layout.pp))
    if layout.virtual > 1:
        held = min(float(count), layout.pp + (layout.pp - 1) / layout.virtual)
    return held


def memory(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    cluster: Cluster,
    stack: Stack = MODERN,
) -> Memory:
    """Memory of `layout`. Nothing is checked against the GPU's size here."""
    ranks = stage_layers(model.layers, layout.pp, layout.virtual)
    ends = model.embedding_params * (1 if layout.pp > 1 or model.tied else 2)
    held = (ranks[0] * model.layer_params + ends) / layout.tp
    shard = layout.dp_shard
    count = layout.micro_batches(global_batch)
    flash = stack.attention == "flash"
    each = layer_activation_bytes(model, layout, flash)
    kept = ranks[0] * each * micro_batches_held(layout, count)
    tokens = layout.micro_batch * model.seq_len
    working = 0.0
    if layout.recompute != "none":  # one layer is whole while it is done again
        plain = Layout(
            tp=layout.tp,
            micro_batch=layout.micro_batch,
            sequence_parallel=layout.sequence_parallel,
        )
        working = layer_activation_bytes(model, plain, flash) - each
    logits = tokens * model.vocab_size / layout.tp * 6.0 if layout.pp == 1 else 0.0
    gathered = 2.0 * WEIGHT_BYTES * model.layer_params / layout.tp if layout.zero == 3 else 0.0
    return Memory(
        weights=WEIGHT_BYTES * held / (shard if layout.zero == 3 else 1),
        gradients=layout.reduce_bytes * held / (shard if layout.zero >= 2 else 1),
        optimizer=OPTIMIZER_STATE_BYTES * held / (shard if layout.zero >= 1 else 1),
        activations=kept,
        buffers=RESERVED_BYTES + working + logits + gathered,
        arenas_per_host=arena_bytes(model, layout, cluster),
    )


def arena_bytes(model: ModelConfig, layout: Layout, cluster: Cluster) -> float:
    """Host memory for the snapshot slots of one host: three of its own and three of one peer.

    A rank's image is its share of all states; what replicas hold in common is split among them.
    """
    image = OPTIMIZER_STATE_BYTES * model.params / layout.gpus
    return (OWN_SLOTS + PEER_SLOTS) * image * cluster.gpus_per_node

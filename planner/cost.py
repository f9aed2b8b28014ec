"""Seconds of one training step, by part, of one layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from keepstep.planner.cluster import Cluster
from keepstep.planner.comm import (
    WEIGHT_BYTES,
    all_reduce_bytes,
    axis,
    boundary_bytes,
    gather_bytes,
    neighbour,
    tp_layer_collectives,
)
from keepstep.planner.kernels import head_pass, layer_pass, memory_s
from keepstep.planner.layout import Layout, Recompute
from keepstep.planner.model import ModelConfig
from keepstep.planner.stack import MODERN, Stack

OPTIMIZER_BYTES = 36.0
"""Adam with fp32 weights: read and write three states, read the gradient twice, write weights."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step on the slowest stage; they add up to `total_s`.

    compute: the stage's kernels; tp, pp, dp: communication that nothing hides; bubble: waiting
    for other stages; optimizer: the update.
    """

    compute_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    bubble_s: float
    optimizer_s: float
    windows: Windows

    @property
    def total_s(self) -> float:
        """The whole step."""
        parts = self.compute_s + self.tp_s + self.pp_s + self.dp_s
        return parts + self.bubble_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Windows:
    """Per step: seconds on the wire of each axis, and the seconds of compute that may hide them."""

    dp_wire_s: float
    dp_hide_s: float
    tp_wire_s: float
    tp_hide_s: float
    pp_wire_s: float
    pp_hide_s: float


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of one layer (or of the ends) for one micro batch.

    `tp_wire_s` is what its collectives take, `tp_exposed_s` what is not hidden of it.
    """

    forward_s: float
    backward_s: float
    tp_wire_s: float
    tp_exposed_s: float
    tp_hide_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Kernels of both passes."""
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        """Kernels and exposed collectives."""
        return self.compute_s + self.tp_exposed_s


BlockKey = tuple[int, int, bool, Recompute]


class CostModel:
    """Step costs of one model on one cluster under one software stack; remembers what it priced."""

    def __init__(self, model: ModelConfig, cluster: Cluster, stack: Stack = MODERN) -> None:
        self.model = model
        self.cluster = cluster
        self.stack = stack
        self._blocks: dict[BlockKey, Block] = {}
        self._ends: dict[tuple[int, int], Block] = {}

    def layer(self, layout: Layout) -> Block:
        """One layer, one micro batch, recompute included."""
        key = (layout.micro_batch, layout.tp, layout.sequence_parallel, layout.recompute)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._price_layer(layout)
        return found

    def _price_layer(self, layout: Layout) -> Block:
        flash = self.stack.attention == "flash"
        one = layer_pass(
            self.model,
            self.cluster.gpu,
            self.cluster.efficiency,
            layout.micro_batch,
            layout.tp,
            layout.sequence_parallel,
            flash,
        )
        backward = one.backward_s
        if layout.recompute == "full":
            backward += one.forward_s
        elif layout.recompute == "selective":
            backward += one.attention_s
        collective = self._tp_collective_s(layout)
        first, second = tp_layer_collectives(layout)
        wire = (first + second) * collective
        hide = one.backward_s / 2 if self.stack.overlap_tp else 0.0
        hidden = min(collective, hide)
        return Block(one.forward_s, backward, wire, wire - hidden, hide)

    def _tp_collective_s(self, layout: Layout) -> float:
        hidden = WEIGHT_BYTES * layout.micro_batch * self.model.seq_len * self.model.dim
        group = axis(self.cluster, layout.tp, 1)
        return group.seconds(all_reduce_bytes(hidden, layout.tp))

    def ends(self, layout: Layout) -> Block:
        """The output matrix, the loss and the two ends' collectives, one micro batch."""
        key = (layout.micro_batch, layout.tp)
        found = self._ends.get(key)
        if found is None:
            gpu, reached = self.cluster.gpu, self.cluster.efficiency
            one = head_pass(self.model, gpu, reached, layout.micro_batch, layout.tp)
            wire = 2 * self._tp_collective_s(layout)
            found = self._ends[key] = Block(one.forward_s, one.backward_s, wire, wire)
        return found

    def step(self, layout: Layout, global_batch: int) -> StepCost:
        """The cost of one step. The layout is not checked: see `layouts.refusal`."""
        count = max(1, layout.micro_batches(global_batch))
        layer, ends = self.layer(layout), self.ends(layout)
        ranks = stage_layers(self.model.layers, layout.pp, layout.virtual)
        most, last = ranks[0], ranks[-1]
        body = most * layer.total_s
        tail = last * layer.total_s + ends.total_s
        slowest = max(body, tail)
        layers, has_end = (last, 1) if tail >= body else (most, 0)
        everything = self.model.layers * layer.total_s + ends.total_s
        compute = layers * layer.compute_s + has_end * ends.compute_s
        exposed_tp = layers * layer.tp_exposed_s + has_end * ends.tp_exposed_s
        pp_wire, pp_exposed = self._pipeline(layout, count, slowest)
        dp_wire, dp_hide, dp_exposed = self._data(layout, count, most, layer)
        return StepCost(
            compute_s=count * compute,
            tp_s=count * exposed_tp,
            pp_s=pp_exposed,
            dp_s=dp_exposed,
            bubble_s=max(0.0, everything - slowest) / layout.virtual,
            optimizer_s=self._optimizer(layout, most),
            windows=Windows(
                dp_wire_s=dp_wire,
                dp_hide_s=dp_hide,
                tp_wire_s=count * (layers * layer.tp_wire_s + has_end * ends.tp_wire_s),
                tp_hide_s=count * layers * layer.tp_hide_s,
                pp_wire_s=pp_wire,
                pp_hide_s=count * slowest,
            ),
        )

    def _pipeline(self, layout: Layout, count: int, slowest: float) -> tuple[float, float]:
        """Wire and exposed seconds between stages.

        Each chunk's result goes on and its gradient comes back. A plain schedule waits for both;
        an interleaved one runs another chunk meanwhile, if the software overlaps it.
        """
        if layout.pp == 1:
            return 0.0, 0.0
        link = neighbour(self.cluster, layout)
        one = link.seconds(boundary_bytes(self.model, layout))
        if layout.tp > 1:  # the next stage's GPUs put the tp slices together again
            hidden = WEIGHT_BYTES * layout.micro_batch * self.model.seq_len * self.model.dim
            one += axis(self.cluster, layout.tp, 1).seconds(gather_bytes(hidden, layout.tp))
        each = one
        if layout.virtual > 1 and self.stack.overlap_pp:
            each = max(0.0, one - slowest / (2 * layout.virtual))
        rounds = 2.0 * count * layout.virtual
        return rounds * one, rounds * each + 2.0 * (layout.pp - 1) * one

    def _held(self, layout: Layout, most: int) -> float:
        """Parameters on a GPU of the fullest stage."""
        ends = 1 if layout.pp > 1 or self.model.tied else 2
        body = most * self.model.layer_params + ends * self.model.embedding_params
        return body / layout.tp

    def _data(
        self, layout: Layout, count: int, most: int, layer: Block
    ) -> tuple[float, float, float]:
        """Wire seconds, seconds that can hide them, and exposed seconds of the data axes."""
        if layout.dp == 1:
            return 0.0, 0.0, 0.0
        held = self._held(layout, most)
        shard = axis(self.cluster, layout.dp_shard, layout.tp)
        replicas = axis(self.cluster, layout.dp_replicate, layout.tp * layout.dp_shard)
        gradient, weight = layout.reduce_bytes * held, WEIGHT_BYTES * held
        tail = 1.0 / max(1, most)  # the first layer's gradients have no compute left over them
        if layout.zero == 0:
            group = axis(self.cluster, layout.dp, layout.tp)
            wire = group.seconds(all_reduce_bytes(gradient, layout.dp))
            return self._hidden(wire, most * layer.backward_s, tail)
        across = replicas.seconds(all_reduce_bytes(gradient / layout.dp_shard, replicas.size))
        reduce = shard.seconds(gather_bytes(gradient, shard.size))
        gather = shard.seconds(gather_bytes(weight, shard.size))
        forward, backward = most * layer.forward_s, most * layer.backward_s
        if layout.zero == 3:
            first = self._hidden(gather, forward, tail)
            second = self._hidden(gather + reduce, backward, tail)
            each = [count * (a + b) for a, b in zip(first, second, strict=True)]
            return each[0] + across, each[1], each[2] + across
        first = self._hidden(gather, forward, tail)
        second = self._hidden(reduce + across, backward, tail)
        return first[0] + second[0], first[1] + second[1], first[2] + second[2]

    def _hidden(self, wire: float, window: float, tail: float) -> tuple[float, float, float]:
        if not self.stack.overlap_dp:
            return wire, 0.0, wire
        return wire, window, max(wire * tail, wire - window)

    def _optimizer(self, layout: Layout, most: int) -> float:
        shards = layout.dp_shard if layout.zero else 1
        held = self._held(layout, most)
        return memory_s(OPTIMIZER_BYTES * held / shards, self.cluster.gpu, self.cluster.efficiency)

    def model_flops(self, global_batch: int) -> float:
        """Model FLOPs of one step: nothing that is done twice counts twice."""
        tokens = global_batch * self.model.seq_len
        return tokens * self.model.flops_per_token(self.stack.causal_flops)

    def hardware_flops(self, layout: Layout, global_batch: int) -> float:
        """Model FLOPs and those of recomputing."""
        tokens = global_batch * self.model.seq_len
        causal = self.stack.causal_flops
        again = 0.0
        if layout.recompute == "full":
            again = self.model.layers * self.model.layer_forward_flops(causal)
        elif layout.recompute == "selective":
            share = 0.5 if causal else 1.0
            again = self.model.layers * 4.0 * self.model.seq_len * self.model.dim * share
        return self.model_flops(global_batch) + tokens * again


@lru_cache(maxsize=4096)
def stage_layers(layers: int, pp: int, virtual: int) -> tuple[int, ...]:
    """Layers of each pipeline rank.

    The layers are cut into pp x virtual chunks; what does not divide goes to the first chunks, so
    that the last one, which has the head, is spared. Rank r has chunks r, r + pp, ...
    """
    base, extra = divmod(layers, pp * virtual)
    chunks = [base + (1 if chunk < extra else 0) for chunk in range(pp * virtual)]
    return tuple(sum(chunks[rank::pp]) for rank in range(pp))

"""Seconds of one training step, by part, of one layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from keepstep.planner.cluster import Cluster
from keepstep.planner.comm import (
    WEIGHT_BYTES,
    axis,
    boundary_bytes,
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
        reached, launch = self.cluster.efficiency, 0.0
        if self.stack.serial_launch:  # it adds to the pass, instead of being the least it can take
            reached, launch = replace(reached, host_s=0.0), reached.host_s
        one = layer_pass(
            self.model,
            self.cluster.gpu,
            reached,
            layout.micro_batch,
            layout.tp,
            layout.sequence_parallel,
            flash,
        )
        forward, backward = one.forward_s + launch, one.backward_s + launch
        if layout.recompute == "full":
            backward += forward
        elif layout.recompute == "selective":
            backward += one.attention_s
        collective = self._tp_collective_s(layout)
        first, second = tp_layer_collectives(layout)
        wire = (first + second) * collective
        hide = one.backward_s / 2 if self.stack.overlap_tp else 0.0
        hidden = min(collective, hide)
        return Block(forward, backward, wire, wire - hidden, hide)

    def _tp_collective_s(self, layout: Layout) -> float:
        hidden = WEIGHT_BYTES * layout.micro_batch * self.model.seq_len * self.model.dim
        return axis(self.cluster, layout.tp, 1).all_reduce_s(hidden)

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
        cost = StepCost(
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
        return self._share_cores(cost, layout, count) if self.cluster.cores_per_node else cost

    def _share_cores(self, cost: StepCost, layout: Layout, count: int) -> StepCost:
        """The cost where a node's ranks share its cores, and moving bytes takes cores too.

        What the ranks do adds up and is divided by the cores; a rank that waits costs nothing.
        The step is never shorter than its critical path with a core to every rank.
        """
        ranks = min(layout.gpus, self.cluster.gpus_per_node)
        crowd = max(1.0, ranks / self.cluster.cores_per_node)
        layer, ends, stages = self.layer(layout), self.ends(layout), layout.pp
        everything = self.model.layers * layer.compute_s + ends.compute_s
        wires = self.model.layers * layer.tp_wire_s + ends.tp_wire_s
        compute, tp = (crowd * count * work / stages for work in (everything, wires))
        pp, dp = crowd * cost.windows.pp_wire_s, crowd * cost.windows.dp_wire_s
        optimizer = crowd * cost.optimizer_s
        waiting = max(0.0, cost.total_s - (compute + tp + pp + dp + optimizer))
        return StepCost(compute, tp, pp, dp, waiting, optimizer, cost.windows)

    def _pipeline(self, layout: Layout, count: int, slowest: float) -> tuple[float, float]:
        """Wire and exposed seconds between stages.

        Each chunk's result goes on and its gradient comes back. A plain schedule waits for both;
        an interleaved one runs another chunk meanwhile, if the software overlaps it.
        """
        if layout.pp == 1:
            return 0.0, 0.0
        rate, delay = neighbour(self.cluster, layout)
        one = boundary_bytes(self.model, layout) / rate + delay
        if layout.tp > 1:  # the next stage's GPUs put the tp slices together again
            hidden = WEIGHT_BYTES * layout.micro_batch * self.model.seq_len * self.model.dim
            one += axis(self.cluster, layout.tp, 1).gather_s(hidden)
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
        forward, backward = most * layer.forward_s, most * layer.backward_s
        tail = 1.0 / max(1, most)  # the first layer's gradients have no compute left over them
        if layout.zero == 0:
            wire = axis(self.cluster, layout.dp, layout.tp).all_reduce_s(gradient)
            return self._hidden(wire, backward, tail)
        across = replicas.all_reduce_s(gradient / layout.dp_shard)
        rounds = most if layout.zero == 3 else 1
        if self.stack.per_layer:
            rounds = most + 1
        reduce = shard.gather_s(gradient, rounds)
        gather = shard.gather_s(weight, rounds)
        if layout.zero == 3:
            first = self._hidden(gather, forward, tail)
            reduces = 1.0 / count if self.stack.per_layer else 1.0
            second = self._hidden(gather + reduces * reduce, backward, tail)
            each = [count * (a + b) for a, b in zip(first, second, strict=True)]
            return each[0] + across, each[1], each[2] + across
        scatters = count if layout.zero == 2 else 1
        first = self._hidden(gather, forward, tail)
        second = self._hidden(scatters * reduce + across, scatters * backward, tail)
        return first[0] + second[0], first[1] + second[1], first[2] + second[2]

    def _hidden(self, wire: float, window: float, tail: float) -> tuple[float, float, float]:
        """Wire, window and exposed seconds; hidden traffic slows the compute over it a little."""
        if not self.stack.overlap_dp:
            return wire, 0.0, wire
        exposed = max(wire * tail, wire - window)
        taxed = self.cluster.efficiency.overlap_tax * (wire - exposed)
        return wire, window, exposed + taxed

    def _optimizer(self, layout: Layout, most: int) -> float:
        shards = layout.dp_shard if layout.zero else 1
        held = self._held(layout, most)
        reached = self.cluster.efficiency
        return (
            memory_s(OPTIMIZER_BYTES * held / shards, self.cluster.gpu, reached)
            + reached.step_host_s
        )

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

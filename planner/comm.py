"""Bytes on the links and the seconds that they take.

Bytes are those that one GPU sends (the ring algorithms of NCCL and gloo). Ranks lie pp outermost,
then dp_replicate, dp_shard, and tp innermost, so a tp group is neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from keepstep.planner.cluster import Cluster
from keepstep.planner.layout import Layout
from keepstep.planner.model import ModelConfig

WEIGHT_BYTES = 2


def all_reduce_bytes(size_bytes: float, group: int) -> float:
    """Sent by each of `group` GPUs to all-reduce `size_bytes`: 2 (n-1)/n of it."""
    return 2.0 * (group - 1) / group * size_bytes


def gather_bytes(size_bytes: float, group: int) -> float:
    """Sent by each GPU to all-gather into, or reduce-scatter from, `size_bytes`: (n-1)/n of it."""
    return (group - 1) / group * size_bytes


@dataclass(frozen=True, slots=True)
class Axis:
    """A group of `size` ranks, what each of its GPUs can send one way, and the delay of its hops.

    `around_s` is once around the ring, `across_s` once up or down a tree, `call_s` what a member
    needs to make the call.
    """

    size: int
    bytes_per_s: float
    around_s: float
    across_s: float
    call_s: float = 0.0

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds to all-reduce `size_bytes`: a ring's bytes, a tree's delay."""
        if self.size == 1:
            return 0.0
        delay = 2 * (self.across_s + self.call_s)
        return all_reduce_bytes(size_bytes, self.size) / self.bytes_per_s + delay

    def gather_s(self, size_bytes: float, rounds: int = 1) -> float:
        """Seconds to all-gather into, or reduce-scatter from, `size_bytes`, in `rounds` pieces.

        NCCL has only the ring for these, so each piece waits for every hop.
        """
        if self.size == 1:
            return 0.0
        delay = rounds * (self.around_s + self.call_s)
        return gather_bytes(size_bytes, self.size) / self.bytes_per_s + delay


def axis(cluster: Cluster, size: int, stride: int) -> Axis:
    """The axis of groups of `size` ranks, `stride` apart.

    Inside a node it has the node's links. Across nodes a ring enters and leaves a node once, so
    the k members of a group in one node share one ring, and gpus_per_node / k rings share the
    node's network.
    """
    reached = cluster.efficiency
    link = cluster.gpu.link_bytes_per_s * reached.link
    if size * stride <= cluster.gpus_per_node:
        hop = reached.link_latency_s
        return Axis(size, link, (size - 1) * hop, ceil(log2(size)) * hop, reached.call_s)
    members = min(size, max(1, cluster.gpus_per_node // stride))
    share = cluster.nic_bytes_per_s * reached.nic * members / cluster.gpus_per_node
    nodes = ceil(size / members)
    around = (nodes - 1) * reached.nic_latency_s + (size - nodes) * reached.link_latency_s
    across = ceil(log2(nodes)) * reached.nic_latency_s
    across += ceil(log2(members)) * reached.link_latency_s
    return Axis(size, min(link, share), around, across, reached.call_s)


def neighbour(cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Bytes per second and delay to the next pipeline stage; all GPUs of a node send at once."""
    reached = cluster.efficiency
    link = cluster.gpu.link_bytes_per_s * reached.link
    if layout.gpus <= cluster.gpus_per_node:
        return link, reached.link_latency_s + reached.call_s
    nic = cluster.nic_bytes_per_s * reached.nic / cluster.gpus_per_node
    return min(link, nic), reached.nic_latency_s + reached.call_s


@dataclass(frozen=True, slots=True)
class AxisBytes:
    """What one GPU sends per optimizer step, the mean over all GPUs."""

    dp: float
    tp: float
    pp: float


def boundary_bytes(model: ModelConfig, layout: Layout) -> float:
    """What one GPU sends to the next stage per micro batch: 2bsh, cut by tp (SC'21 4.1)."""
    return WEIGHT_BYTES * layout.micro_batch * model.seq_len * model.dim / layout.tp


def tp_layer_collectives(layout: Layout) -> tuple[int, int]:
    """All-reduces of 2bsh (or their reduce-scatter + all-gather) of a layer, forward, backward."""
    return 2, 4 if layout.recompute == "full" else 2


def dp_bytes(layout: Layout, params: float, micro_batches: int) -> float:
    """What one GPU sends over the data axes per step for the `params` that it holds.

    zero 0: one all-reduce of gradients. zero 1: reduce-scatter of gradients, all-gather of
    weights, once; zero 2 keeps no whole gradient, so it scatters every micro batch's. zero 3: two
    all-gathers and a reduce-scatter per micro batch. With replicas of the shards, each shard's
    gradients are all-reduced over them in addition.
    """
    shard, replicas = layout.dp_shard, layout.dp_replicate
    gradient = layout.reduce_bytes * params
    if layout.zero == 0:
        return all_reduce_bytes(gradient, layout.dp)
    across = all_reduce_bytes(gradient / shard, replicas)
    weight = WEIGHT_BYTES * params
    if layout.zero == 3:
        each = 2 * gather_bytes(weight, shard) + gather_bytes(gradient, shard)
        return micro_batches * each + across
    scatters = micro_batches if layout.zero == 2 else 1
    return gather_bytes(scatters * gradient + weight, shard) + across


def step_bytes(model: ModelConfig, layout: Layout, global_batch: int) -> AxisBytes:
    """Bytes per axis, per GPU and step: the mean over all GPUs.

    tp: every layer's collectives, the embedding's and the head's all-reduce at the two ends.
    pp: activations and their gradients over each boundary, `virtual` times around.
    """
    count = layout.micro_batches(global_batch)
    hidden = WEIGHT_BYTES * layout.micro_batch * model.seq_len * model.dim
    forward, backward = tp_layer_collectives(layout)
    rounds = (model.layers * (forward + backward) + 2) / layout.pp
    boundaries = layout.pp * layout.virtual - 1
    held = model.params / (layout.tp * layout.pp)
    tied = 0.0
    if model.tied and layout.pp > 1:
        ends = all_reduce_bytes(layout.reduce_bytes * model.embedding_params / layout.tp, 2)
        tied = 2 * ends / layout.pp
        held += model.embedding_params / (layout.tp * layout.pp)
    return AxisBytes(
        dp=dp_bytes(layout, held, count),
        tp=count * rounds * all_reduce_bytes(hidden, layout.tp),
        pp=count * 2 * boundary_bytes(model, layout) * boundaries / layout.pp + tied,
    )

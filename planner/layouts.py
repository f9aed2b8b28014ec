"""Which layouts there are, and the one reason why a layout cannot run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from keepstep.planner.cluster import Cluster
from keepstep.planner.errors import BadLayout
from keepstep.planner.layout import RECOMPUTES, Layout, Recompute
from keepstep.planner.model import ModelConfig

_SIZE = re.compile(r"[1-9][0-9]{0,6}")  # no digits of other scripts, no endless numbers


@dataclass(frozen=True)
class Constraints:
    """What is given, and what the planner may choose from.

    global_batch: samples per step, of all replicas. tp_max, pp_max: 0 for no limit beyond the
    node's size and the model's layers.
    """

    global_batch: int
    tp_max: int = 0
    pp_max: int = 0
    micro_batch_max: int = 32
    virtual_max: int = 8
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    reduce_bytes: tuple[int, ...] = (4, 2)
    sequence_parallel: tuple[bool, ...] = (True, False)


@dataclass(frozen=True)
class Refused:
    """A layout that cannot run, and the first reason why."""

    layout: Layout
    reason: str


def refusal(
    model: ModelConfig, cluster: Cluster, layout: Layout, constraints: Constraints
) -> str | None:
    """The first reason why `layout` cannot run, naming the two numbers; None if it can.

    Memory is not looked at here.
    """
    reason = structural_refusal(model, cluster, layout, constraints)
    if reason:
        return reason
    batch, dp, micro = constraints.global_batch, layout.dp, layout.micro_batch
    if batch % (dp * micro):
        return f"global batch {batch} is no multiple of dp {dp} x micro batch {micro}"
    count = layout.micro_batches(batch)
    if count < layout.pp:
        return f"pp {layout.pp} is more than the number of micro batches, {count}"
    if layout.virtual > 1 and count % layout.pp:
        return f"{count} micro batches are no multiple of pp {layout.pp}, as interleaving needs"
    return None


def structural_refusal(
    model: ModelConfig, cluster: Cluster, layout: Layout, constraints: Constraints
) -> str | None:
    """The part of `refusal` that the sizes of the axes decide, whatever the batch."""
    tp, pp = layout.tp, layout.pp
    if layout.gpus > cluster.gpus:
        return f"it needs {layout.gpus} GPUs; there are {cluster.gpus}"
    limit = constraints.tp_max or cluster.gpus_per_node
    if tp > limit:
        return f"tp {tp} is more than {limit}, the GPUs that share a node's links"
    for what, size in (("heads", model.heads), ("kv heads", model.kv_heads)):
        if size % tp:
            return f"{what} {size} are no multiple of tp {tp}"
    if model.ffn_dim % tp:
        return f"ffn_dim {model.ffn_dim} is no multiple of tp {tp}"
    if model.vocab_size % tp:
        return f"vocab_size {model.vocab_size} is no multiple of tp {tp}: pad it"
    if tp > 1 and layout.sequence_parallel and model.seq_len % tp:
        return f"seq_len {model.seq_len} is no multiple of tp {tp}, as sequence parallel needs"
    if constraints.pp_max and pp > constraints.pp_max:
        return f"pp {pp} is more than the limit of {constraints.pp_max}"
    stages = pp * layout.virtual
    if stages > model.layers:
        return f"{stages} stages are more than {model.layers} layers"
    if layout.virtual > 1 and (pp == 1 or model.layers % stages):
        return f"{model.layers} layers are no multiple of {stages} stages, as interleaving needs"
    return None


def sizes(cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """(dp, tp, pp) that use every GPU; tp up to twice a node, to say why more does not work."""
    for tp in divisors(cluster.gpus):
        if tp > 2 * cluster.gpus_per_node:
            break
        for pp in divisors(cluster.gpus // tp):
            yield cluster.gpus // (tp * pp), tp, pp


def variants(model: ModelConfig, constraints: Constraints, base: Layout) -> Iterator[Layout]:
    """All ways to run the sizes of `base`: schedule, micro batch, memory savings, sharding."""
    dp, pp = base.dp, base.pp
    per_replica = constraints.global_batch // dp
    micros = [n for n in divisors(per_replica) if n <= constraints.micro_batch_max]
    virtuals = [1]
    if pp > 1 and model.layers % pp == 0:
        virtuals = [n for n in divisors(model.layers // pp) if n <= constraints.virtual_max]
    parallel = constraints.sequence_parallel if base.tp > 1 else (True,)
    for micro in micros:
        for virtual in virtuals:
            for recompute in constraints.recomputes:
                for sequence in parallel:
                    one = replace(
                        base,
                        micro_batch=micro,
                        virtual=virtual,
                        recompute=recompute,
                        sequence_parallel=sequence,
                    )
                    yield from shardings(one, constraints)


def shardings(base: Layout, constraints: Constraints) -> Iterator[Layout]:
    """What the data axes shard: nothing, states, gradients or weights, whole or in groups."""
    dp = base.dp
    for width in constraints.reduce_bytes:
        for zero in constraints.zeros:
            if dp == 1 and zero != min(constraints.zeros):
                continue
            shards = [1] if zero == 0 else [dp]
            if zero == 3:
                shards += [n for n in divisors(dp) if 8 <= n < dp and n.bit_length() % 2 == 0]
            for shard in shards:
                yield replace(
                    base, dp_replicate=dp // shard, dp_shard=shard, zero=zero, reduce_bytes=width
                )


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def parse_layout(text: str) -> Layout:
    """A layout from "dp=2x8,tp=8,pp=4,virtual=2,micro=1,recompute=full,sp=off,zero=1,reduce=bf16".

    Keys that keep their default may be left out; spaces do for commas. Raises BadLayout naming the
    key and what it may be.
    """
    values: dict[str, object] = {}
    for part in filter(None, text.replace(",", " ").split()):
        key, sign, value = part.partition("=")
        if not sign:
            raise BadLayout(f"layout {text!r}: {part!r} is not key=value")
        values |= _setting(text, key.strip(), value.strip())
    return Layout(**values)  # type: ignore[arg-type]  # _setting checked each


def _setting(text: str, key: str, value: str) -> dict[str, object]:
    numbers = {"tp": "tp", "pp": "pp", "virtual": "virtual", "micro": "micro_batch"}
    words: dict[str, dict[str, object]] = {
        "recompute": {name: name for name in RECOMPUTES},
        "sp": {"on": True, "off": False},
        "reduce": {"fp32": 4, "bf16": 2},
        "zero": {"0": 0, "1": 1, "2": 2, "3": 3},
    }
    names = {"recompute": "recompute", "sp": "sequence_parallel", "zero": "zero"}
    names["reduce"] = "reduce_bytes"
    if key == "dp":
        replicate, _, shard = value.rpartition("x")
        pair = (replicate or "1", shard)
        if all(map(_SIZE.fullmatch, pair)):
            return {"dp_replicate": int(pair[0]), "dp_shard": int(pair[1])}
        raise BadLayout(f"layout {text!r}: dp={value} must be N or REPLICATExSHARD")
    if key in numbers:
        if _SIZE.fullmatch(value):
            return {numbers[key]: int(value)}
        raise BadLayout(f"layout {text!r}: {key}={value} must be a number from 1")
    if key in words:
        if value in words[key]:
            return {names[key]: words[key][value]}
        raise BadLayout(f"layout {text!r}: {key}={value} must be one of {', '.join(words[key])}")
    known = ("dp", *numbers, *words)
    raise BadLayout(f"layout {text!r}: unknown key {key!r}; known: {', '.join(known)}")

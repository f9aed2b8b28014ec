"""A layout: how one model's training step is cut over a cluster's GPUs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes, and how the step is run on them.

    dp_replicate x dp_shard data parallel, of which dp_shard hold shards (of what, says `zero`: 0
    nothing, 1 optimizer, 2 + gradients, 3 + weights), tp tensor, pp pipeline with `virtual` stages
    per rank, `micro_batch` samples at a time. `reduce_bytes` is the width of a reduced gradient.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    zero: int = 1
    reduce_bytes: int = 4

    @property
    def dp(self) -> int:
        """Data parallel replicas of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.dp * self.tp * self.pp

    def micro_batches(self, global_batch: int) -> int:
        """Micro batches per replica and step."""
        return global_batch // (self.dp * self.micro_batch)

    def __str__(self) -> str:
        parts = [f"dp={self.dp}"]
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts = [f"dp={self.dp_replicate}x{self.dp_shard}"]
        parts += [f"tp={self.tp}", f"pp={self.pp}"]
        if self.virtual > 1:
            parts.append(f"virtual={self.virtual}")
        parts.append(f"micro={self.micro_batch}")
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute}")
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("sp=off")
        parts += [f"zero={self.zero}", f"reduce={'fp32' if self.reduce_bytes == 4 else 'bf16'}"]
        return ",".join(parts)

"""What the numerics need to know, as frozen plain data: no torch here.

`config.py` nests these in the run's config; `check.py` says in sentences what cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

IGNORED = -100
"""The label of a position that has none: not part of the loss."""

Dtype = Literal["fp32", "fp64", "bf16"]
Schedule = Literal["1f1b", "interleaved1f1b"]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes count elements."""

    vocab_size: int = 256
    dim: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn_dim: int = 128
    seq_len: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.dim // self.heads


@dataclass(frozen=True)
class ParallelConfig:
    """The layout. Ranks are row-major over (pp, dp_replicate, dp_shard, tp), tp fastest.

    dp: all data-parallel replicas; dp_replicate of them hold whole copies (HSDP), so that
    parameters are sharded over dp / dp_replicate ranks. virtual: stages per pipeline rank.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    schedule: Schedule = "1f1b"
    virtual: int = 1

    @property
    def dp_shard(self) -> int:
        """Ranks over which each parameter is sharded."""
        return self.dp // self.dp_replicate

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.dp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pp * self.virtual


@dataclass(frozen=True)
class BatchConfig:
    """Samples per step over all ranks, and samples per micro-batch of one data-parallel rank.

    Accumulation and pipeline micro-batches are the same: global_batch / (dp x micro_batch).
    """

    global_batch: int = 16
    micro_batch: int = 2

    def micro_batches(self, dp: int) -> int:
        """Micro-batches per step on each data-parallel rank."""
        return self.global_batch // (dp * self.micro_batch)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule: linear warm-up, then cosine to lr * lr_min_ratio at schedule_steps.

    clip_norm: the largest global gradient norm; 0 switches clipping off. Weight decay applies to
    matrices, not to norm weights.
    """

    lr: float = 3e-3
    lr_min_ratio: float = 0.1
    warmup_steps: int = 10
    schedule_steps: int = 1000
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True)
class NumericsConfig:
    """Everything that `build` needs. bf16: fp32 master weights, bf16 compute, fp32 reduction."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    dtype: Dtype = "fp32"
    activation_checkpointing: bool = False
    seed: int = 0

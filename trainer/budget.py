"""The least bytes that a layout must send in a step, to stand beside what was counted.

Summed over all ranks. Formulae: a ring over n ranks sends 2 (n - 1) N for an all-reduce of N bytes
and (n - 1) N for an all-gather or a reduce-scatter. Counted: each weight gathered once and each
gradient reduced once (ZeRO; with replicas, their shards all-reduced); tensor parallelism's four
all-reduces per layer and micro-batch (as gathers and scatters under sequence parallelism), the
two at the vocabulary's ends, and three numbers per token for the loss; activations and their
gradients across each stage boundary; the tied pair's gradient. Not counted: the few numbers of the
step's own reduction. Sources: ZeRO (2019), Megatron-LM (SC'21), Korthikanti et al. (2022).
"""

from __future__ import annotations

from keepstep.trainer.flops import parameters
from keepstep.trainer.model_config import NumericsConfig

_WEIGHT_BYTES = {"fp32": (4, 4), "fp64": (8, 8), "bf16": (2, 4)}  # gathered as, reduced as


def least_bytes(config: NumericsConfig) -> dict[str, float]:
    """Bytes per axis ("dp", "tp", "pp") and step, summed over ranks."""
    return {"dp": _data(config), "tp": _tensor(config), "pp": _pipeline(config)}


def _held(config: NumericsConfig) -> tuple[int, int]:
    """Elements over all pipeline ranks: of matrices (split over tp), and of norm weights."""
    model, parallel = config.model, config.parallel
    norms = (2 * model.layers + 1) * model.dim
    matrices = parameters(model) - norms
    if model.tied and parallel.pp > 1:
        matrices += model.vocab_size * model.dim  # the pair is held at both ends
    return matrices, norms


def _data(config: NumericsConfig) -> float:
    parallel = config.parallel
    gathered, reduced = _WEIGHT_BYTES[config.dtype]
    matrices, norms = _held(config)
    held = matrices + norms * parallel.tp  # over all tp and pp ranks of one replica
    shard = (parallel.dp_shard - 1) * held * (gathered + reduced) * parallel.dp_replicate
    replicate = 2 * (parallel.dp_replicate - 1) * held * reduced
    return float(shard + replicate)


def _tensor(config: NumericsConfig) -> float:
    model, parallel = config.model, config.parallel
    if parallel.tp == 1:
        return 0.0
    element, reduced = _WEIGHT_BYTES[config.dtype]
    tokens = config.batch.global_batch * model.seq_len
    stream = tokens * model.dim * element
    around = parallel.tp - 1  # each all-reduce of N bytes sends 2 (t - 1) N over its ring
    layers = 4 * model.layers * 2 * around * stream
    ends = 2 * 2 * around * stream
    scalar = 8 if config.dtype == "fp64" else 4
    losses = 3 * 2 * around * tokens * scalar
    norms = 2 * around * _held(config)[1] * reduced * parallel.dp_replicate
    return float(layers + ends + losses + norms)


def _pipeline(config: NumericsConfig) -> float:
    model, parallel = config.model, config.parallel
    if parallel.pp == 1:
        return 0.0
    element, reduced = _WEIGHT_BYTES[config.dtype]
    stream = config.batch.global_batch * model.seq_len * model.dim * element
    boundaries = 2 * (parallel.stages - 1) * stream
    tied = 2 * model.vocab_size * model.dim * reduced if model.tied else 0
    return float(boundaries + tied * parallel.dp_replicate)

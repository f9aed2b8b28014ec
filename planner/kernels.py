"""Seconds on one GPU of the parts of a pass: matrix products, attention, element-wise work."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from keepstep.planner.cluster import Efficiency, Gpu
from keepstep.planner.model import ModelConfig

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))


def gemm_s(m: int, n: int, k: int, gpu: Gpu, efficiency: Efficiency, batch: int = 1) -> float:
    """Seconds of `batch` products (m, k) x (k, n) in 2-byte numbers.

    Each output tile occupies one SM for 2 tm tn (k + knee) FLOPs; tiles run in waves of one per
    SM, and the last wave costs as much as a full one. The best tile shape counts. Never below
    the time in which memory can deliver the operands. A device of 0 SMs has no tiles or waves.
    """
    if gpu.sms == 0:  # no tiles to speak of
        return 2.0 * batch * m * n * k / (gpu.peak_flops * gpu.sustained * efficiency.gemm)
    sm_flops = gpu.peak_flops * gpu.sustained * efficiency.gemm / gpu.sms
    best = float("inf")
    for tile_m, tile_n, rate in TILES:
        waves = ceil(batch * ceil(m / tile_m) * ceil(n / tile_n) / gpu.sms)
        seconds = waves * 2.0 * tile_m * tile_n * (k + efficiency.gemm_knee) / (sm_flops * rate)
        best = min(best, seconds)
    traffic = 2.0 * batch * (m * k + k * n + m * n)
    return max(best, memory_s(traffic, gpu, efficiency))


def memory_s(traffic_bytes: float, gpu: Gpu, efficiency: Efficiency) -> float:
    """Seconds to move `traffic_bytes` to and from the GPU's memory."""
    return traffic_bytes / (gpu.hbm_bytes_per_s * efficiency.hbm)


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro batch's forward and backward, without communication.

    `attention_s` is the part of the forward that selective recompute does again.
    """

    forward_s: float
    backward_s: float
    attention_s: float = 0.0


def layer_pass(
    model: ModelConfig,
    gpu: Gpu,
    efficiency: Efficiency,
    micro_batch: int,
    tp: int,
    sequence_parallel: bool,
    flash: bool,
) -> Pass:
    """One layer on one of `tp` GPUs, for `micro_batch` samples."""
    tokens = micro_batch * model.seq_len
    dim, ffn = model.dim, model.ffn_dim
    qkv = (dim + 2 * model.kv_dim) // tp
    up = ffn * (2 if model.gated else 1) // tp
    products = ((qkv, dim), (dim, dim // tp), (up, dim), (dim, ffn // tp))
    forward = sum(gemm_s(tokens, n, k, gpu, efficiency) for n, k in products)
    backward = sum(
        gemm_s(tokens, k, n, gpu, efficiency) + gemm_s(n, k, tokens, gpu, efficiency)
        for n, k in products
    )
    attention, attention_back = _attention(model, gpu, efficiency, micro_batch, tp, flash)
    spread = tp if sequence_parallel else 1
    plain = tokens * dim * (20 if model.gated else 22) / spread
    cut = tokens * (12 * dim + (6 if model.gated else 8) * ffn) / tp
    moved = memory_s(plain + cut, gpu, efficiency)
    return Pass(
        forward_s=max(forward + attention + moved, efficiency.host_s),
        backward_s=max(backward + attention_back + 2 * moved, efficiency.host_s),
        attention_s=attention,
    )


def _attention(
    model: ModelConfig, gpu: Gpu, efficiency: Efficiency, micro_batch: int, tp: int, flash: bool
) -> tuple[float, float]:
    """Forward and backward seconds of softmax(Q K^T) V."""
    seq, heads = model.seq_len, micro_batch * model.heads / tp
    if flash:
        flops = 4.0 * heads * seq * seq * model.head_dim * 0.5
        seconds = flops / (gpu.peak_flops * gpu.sustained * efficiency.gemm * gpu.flash_share)
        return seconds, 2.5 * seconds
    count = max(1, round(heads))
    scores = gemm_s(seq, seq, model.head_dim, gpu, efficiency, count)
    values = gemm_s(seq, model.head_dim, seq, gpu, efficiency, count)
    softmax = memory_s(9.0 * heads * seq * seq, gpu, efficiency)
    forward = scores + values + softmax
    return forward, 2.0 * forward


def head_pass(
    model: ModelConfig, gpu: Gpu, efficiency: Efficiency, micro_batch: int, tp: int
) -> Pass:
    """The output matrix and the loss: logits in 2 bytes, the loss in 4."""
    tokens, vocab = micro_batch * model.seq_len, ceil(model.vocab_size / tp)
    product = gemm_s(tokens, vocab, model.dim, gpu, efficiency)
    loss = memory_s(tokens * vocab * 12.0, gpu, efficiency)
    back = gemm_s(tokens, model.dim, vocab, gpu, efficiency)
    back += gemm_s(vocab, model.dim, tokens, gpu, efficiency)
    return Pass(forward_s=product + loss, backward_s=back + loss)

"""Model FLOPs of a step, and the share of the device's peak that they come to."""

from __future__ import annotations

from keepstep.trainer.model_config import Dtype, ModelConfig

# Dense bf16 tensor-core peaks in FLOP/s, without sparsity. Source: the data sheets of NVIDIA's
# A100 (2021), H100 (2023), H200 (2024) and B200 (DGX B200, 2024). Longest name first.
_PEAKS_BF16: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("A100", 312e12),
)


def parameters(model: ModelConfig) -> int:
    """Number of parameters; a tied pair counts once."""
    head = model.head_dim
    attention = 2 * model.dim * model.heads * head + 2 * model.dim * model.kv_heads * head
    layer = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    vocabulary = model.vocab_size * model.dim * (1 if model.tied else 2)
    return model.layers * layer + vocabulary + model.dim


def flops_per_token(model: ModelConfig) -> float:
    """Forward and backward FLOPs of one token at full sequence length.

    Convention: 2 per multiply-add; the backward is twice the forward; matrices only (6 per weight
    of the layers and the output; the embedding look-up, norms and rotations count nothing);
    attention is NOT halved for causality (12 x layers x heads x head_dim x seq_len, as PaLM and
    torchtitan count it); recomputation by activation checkpointing is not counted.
    """
    head = model.head_dim
    attention = 2 * model.dim * model.heads * head + 2 * model.dim * model.kv_heads * head
    weights = model.layers * (attention + 3 * model.dim * model.ffn_dim)
    weights += model.vocab_size * model.dim
    return 6.0 * weights + 12.0 * model.layers * model.heads * head * model.seq_len


def peak_flops(device_name: str, dtype: Dtype) -> float | None:
    """The device's peak in FLOP/s; None where it is not known (a CPU, another dtype than bf16)."""
    if dtype != "bf16":
        return None
    return next((peak for name, peak in _PEAKS_BF16 if name.lower() in device_name.lower()), None)


def utilisation(
    model: ModelConfig, tokens_per_s: float, ranks: int, peak: float | None
) -> float | None:
    """Model FLOPs utilisation: the share of `ranks` devices' peak; None without a known peak."""
    if peak is None:
        return None
    return flops_per_token(model) * tokens_per_s / (ranks * peak)

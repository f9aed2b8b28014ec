"""A Llama decoder, free of parallelism: what one device would compute.

Numerically this is the Llama of `transformers`: RMSNorm, rotary positions in the rotate-half
convention, grouped-query attention, SwiGLU, no biases. A stage of a pipeline is the same module
with some of its parts left out; parameter names are those of the whole model in every stage.
Shapes: B samples, S positions, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepstep.trainer.model_config import ModelConfig


@lru_cache(maxsize=8)
def rope_table(
    head_dim: int, positions: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim]; angles in fp32 whatever the dtype, as in HF."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        even = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float()
        inverse = 1.0 / (theta ** (even / head_dim))
        angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [..., S, head_dim] by its position's angle."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dim, with a learned scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention; the number of heads here follows from the weights' rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        rows_q, rows_kv = config.heads * self.head_dim, config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, rows_q, bias=False)
        self.wk = nn.Linear(config.dim, rows_kv, bias=False)
        self.wv = nn.Linear(config.dim, rows_kv, bias=False)
        self.wo = nn.Linear(rows_q, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        q, k, v = (self._heads(linear(x)) for linear in (self.wq, self.wk, self.wv))
        cos, sin = rope_table(self.head_dim, q.shape[-2], self.theta, q.dtype, q.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = k.shape[1] != q.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * head_dim] -> [B, heads, S, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each after its norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """The whole model, or the stage of it that holds `layers` and, at the ends, the vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[int] | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        chosen = range(config.layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in chosen})
        self.norm = RMSNorm(config.dim, config.norm_eps) if last else None
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False) if last else None
        self.tied = config.tied
        self.tie()

    def tie(self) -> None:
        """Make output and embedding one Parameter, where both are here and the model is tied.

        To be called again after anything that makes parameters anew (distributing, to_empty).
        """
        if self.tied and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, S] (in the first stage; else the stream [B, S, D]) -> logits or the stream."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x

"""The plain Llama: its dimensions, and its tensors' names here and at Hugging Face.

Both sides use the half-rotation form of RoPE (`rotate_half`), so no weight is permuted: export and
import only rename. Projections are stored as (out, in) on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MODEL_PREFIX = "model/"
EMBEDDINGS = "tok_embeddings.weight"
OUTPUT = "output.weight"

_OUTER = {
    EMBEDDINGS: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_INNER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_CUT_DIM = {
    "attention.wq.weight": 0,
    "attention.wk.weight": 0,
    "attention.wv.weight": 0,
    "attention.wo.weight": 1,
    "feed_forward.w1.weight": 0,
    "feed_forward.w3.weight": 0,
    "feed_forward.w2.weight": 1,
}
_OUTER_BACK = {hf: ours for ours, hf in _OUTER.items()}
_INNER_BACK = {hf: ours for ours, hf in _INNER.items()}
_OURS = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(.+)")
_HF = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)")


class LlamaShape(msgspec.Struct, frozen=True):
    """The model section of a run's configuration (`values["config"]["model"]`).

    `seq_len` is in tokens. `tied`: the output projection is the embedding matrix itself.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    seq_len: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


def shape_in(values: Mapping[str, Any]) -> LlamaShape | None:
    """The model's dimensions as the manifest's values tell them; None where they do not.

    Further keys of the section are left alone: the trainer may have more settings.
    """
    config = values.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return None
    try:
        return msgspec.convert(model, LlamaShape)
    except msgspec.ValidationError:
        return None


def layer_of(fqn: str) -> int | None:
    """The index i of a parameter called ``layers.<i>.``...; None for any other."""
    match = _OURS.fullmatch(fqn)
    return int(match[1]) if match else None


def hf_name(fqn: str) -> str | None:
    """Hugging Face's name of our parameter `fqn`; None where a Llama has no such parameter."""
    if fqn in _OUTER:
        return _OUTER[fqn]
    match = _OURS.fullmatch(fqn)
    if match is None or match[2] not in _INNER:
        return None
    return f"model.layers.{match[1]}.{_INNER[match[2]]}"


def our_name(hf: str) -> str | None:
    """Our name of Hugging Face's parameter; None where a plain Llama has no such parameter."""
    if hf in _OUTER_BACK:
        return _OUTER_BACK[hf]
    match = _HF.fullmatch(hf)
    if match is None or match[2] not in _INNER_BACK:
        return None
    return f"layers.{match[1]}.{_INNER_BACK[match[2]]}"


def parameter_shapes(llama: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by our name, in model order, with its shape.

    A tied model has no output matrix of its own.
    """
    width, head = llama.dim, llama.head_dim
    inner: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (width,),
        "attention.wq.weight": (llama.heads * head, width),
        "attention.wk.weight": (llama.kv_heads * head, width),
        "attention.wv.weight": (llama.kv_heads * head, width),
        "attention.wo.weight": (width, llama.heads * head),
        "ffn_norm.weight": (width,),
        "feed_forward.w1.weight": (llama.ffn_dim, width),
        "feed_forward.w2.weight": (width, llama.ffn_dim),
        "feed_forward.w3.weight": (llama.ffn_dim, width),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDINGS: (llama.vocab_size, width)}
    for layer in range(llama.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in inner.items()}
    shapes["norm.weight"] = (width,)
    if not llama.tied:
        shapes[OUTPUT] = (llama.vocab_size, width)
    return shapes


def tensor_parallel_dim(fqn: str) -> int | None:
    """The dim of a parameter that tensor parallelism cuts; None for one that every rank has whole.

    Projections into heads and hidden units are cut by output row, those back by input column.
    """
    if fqn in (EMBEDDINGS, OUTPUT):
        return 0
    match = _OURS.fullmatch(fqn)
    if match is None:
        return None
    return _CUT_DIM.get(match[2])

"""`config.json` of a Llama: written so that old and new transformers read it, and read strictly.

Reading refuses, by the name of the setting, whatever would make the model compute something else
than a plain Llama does: a wrong import must not look like a right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keepstep.ckpt.arrays import NUMPY_DTYPES, Array, widens
from keepstep.ckpt.errors import CheckpointError, FormatError
from keepstep.ckpt.llama import LlamaShape

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_BYTES_MAX = 4 << 20
_COUNT_MAX = 1 << 40
_LAYERS_MAX = 100_000

HF_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Our dtype name -> torch's, which config.json uses."""

_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
}
"""Settings with which a model is a plain Llama; an absent one has its default, which is."""


class Unconvertible(CheckpointError):
    """A model that has no equal on the other side; names what differs."""


def config_of(llama: LlamaShape, dtype: str) -> dict[str, Any]:
    """The content of config.json for weights stored as `dtype` (one of `HF_DTYPES`).

    RoPE's base stands twice: `rope_parameters` for transformers 5, `rope_theta` for older ones. So
    does the dtype. The special tokens are none, else a default of Llama 2 would be assumed.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": HF_DTYPES[dtype],
        "eos_token_id": None,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "hidden_size": llama.dim,
        "initializer_range": 0.02,
        "intermediate_size": llama.ffn_dim,
        "max_position_embeddings": llama.seq_len,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": llama.heads,
        "num_hidden_layers": llama.layers,
        "num_key_value_heads": llama.kv_heads,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": llama.norm_eps,
        "rope_parameters": {"rope_theta": llama.rope_theta, "rope_type": "default"},
        "rope_theta": llama.rope_theta,
        "tie_word_embeddings": llama.tied,
        "torch_dtype": HF_DTYPES[dtype],
        "use_cache": True,
        "vocab_size": llama.vocab_size,
    }


def shape_from(config: Mapping[str, Any], file: str) -> LlamaShape:
    """The dimensions that config.json gives.

    Raises:
        Unconvertible: it describes something else than a plain Llama; names the setting.
        FormatError: a setting is missing or is no sensible number; names the field.
    """
    _refuse_others(config, file)
    heads = _count(config, "num_attention_heads", file)
    llama = LlamaShape(
        vocab_size=_count(config, "vocab_size", file),
        dim=_count(config, "hidden_size", file),
        layers=_count(config, "num_hidden_layers", file, at_most=_LAYERS_MAX),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", file, default=heads),
        ffn_dim=_count(config, "intermediate_size", file),
        seq_len=_count(config, "max_position_embeddings", file, default=2048),
        rope_theta=_rope_theta(config, file),
        norm_eps=_real(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", file),
        tied=_flag(config, "tie_word_embeddings", file),
    )
    _check_heads(config, llama, file)
    return llama


def cast(array: Array, dtype: str, name: str) -> Array:
    """`array` as element type `dtype`; itself if it is so already.

    Raises:
        Unconvertible: a finite value does not fit and would become infinite.
    """
    wanted = NUMPY_DTYPES[dtype]
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = array.astype(wanted)
    if not np.array_equal(np.isfinite(array), np.isfinite(result)):
        raise Unconvertible(f"{name} has values beyond the range of {dtype}; choose a wider dtype")
    return result


def cast_note(before: Sequence[str], after: str) -> str:
    """What a cast of element types `before` to `after` does, for people."""
    how = "exactly" if all(widens(each, after) for each in before) else "with rounding"
    return f"weights were cast from {', '.join(before)} to {after}, {how}"


def _refuse_others(config: Mapping[str, Any], file: str) -> None:
    """Raise if a setting makes this another kind of model."""
    for field, allowed in _MUST_BE.items():
        found = config.get(field, allowed[0])
        if found not in allowed:
            raise Unconvertible(
                f"{file}: {field} is {found!r}, where a plain Llama has {allowed[0]!r}; "
                "only plain Llama models can be imported"
            )
    architectures = config.get("architectures")
    if architectures is not None and architectures != ["LlamaForCausalLM"]:
        raise Unconvertible(
            f"{file}: architectures is {architectures!r}, where a plain Llama has "
            "['LlamaForCausalLM']; only plain Llama models can be imported"
        )


def _rope_theta(config: Mapping[str, Any], file: str) -> float:
    """The base of RoPE, from either spelling; raise where RoPE is scaled in any way."""
    parameters = config.get("rope_parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise _wrong(file, "rope_parameters", "an object", parameters)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    extra = sorted(set(parameters) - {"rope_theta", "rope_type", "type", "partial_rotary_factor"})
    if kind != "default" or extra or parameters.get("partial_rotary_factor", 1) != 1:
        raise Unconvertible(
            f"{file}: rope_parameters is {parameters!r}; this is scaled RoPE, and only the plain "
            "one (rope_type 'default') can be imported"
        )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    return _real(theta, "rope_theta", file)


def _check_heads(config: Mapping[str, Any], llama: LlamaShape, file: str) -> None:
    """Raise unless the heads divide the width, and the key-value heads the heads."""
    if llama.dim % llama.heads:
        raise Unconvertible(
            f"{file}: hidden_size {llama.dim} is no multiple of num_attention_heads {llama.heads}"
        )
    if llama.head_dim % 2:
        raise Unconvertible(
            f"{file}: hidden_size {llama.dim} / num_attention_heads {llama.heads} gives heads of "
            f"odd width {llama.head_dim}; rotary positions turn pairs of elements"
        )
    if llama.heads % llama.kv_heads:
        raise Unconvertible(
            f"{file}: num_attention_heads {llama.heads} is no multiple of num_key_value_heads "
            f"{llama.kv_heads}"
        )
    head_dim = config.get("head_dim")
    if head_dim is not None and head_dim != llama.head_dim:
        raise Unconvertible(
            f"{file}: head_dim is {head_dim!r}, where hidden_size {llama.dim} / "
            f"num_attention_heads {llama.heads} gives {llama.head_dim}"
        )


def _count(
    config: Mapping[str, Any],
    field: str,
    file: str,
    default: int | None = None,
    at_most: int = _COUNT_MAX,
) -> int:
    found = config.get(field)
    if found is None and default is not None:
        return default
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= at_most:
        raise _wrong(file, field, f"a whole number from 1 to {at_most}", found)
    return found


def _real(found: object, field: str, file: str) -> float:
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < 1e30:
        raise _wrong(file, field, "a number above 0", found)
    return float(found)


def _flag(config: Mapping[str, Any], field: str, file: str) -> bool:
    found = config.get(field, False)
    if not isinstance(found, bool):
        raise _wrong(file, field, "true or false", found)
    return found


def _wrong(file: str, field: str, expected: str, found: object) -> FormatError:
    return FormatError(file, field, expected, repr(found)[:200])

"""The model as the planner sees it: sizes only, with its parameter and FLOP counts.

The keys are those of a run's `[model]` section. Two more describe older decoders: `gated` (SwiGLU
has three MLP matrices, GPT two) and `positions` (learned position vectors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property

from keepstep.planner.errors import BadModel

IGNORED_KEYS = ("rope_theta", "norm_eps")  # in a run's [model] section, without weight here


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. All sizes are counts; `seq_len` is tokens per sample.

    Raises BadModel if a size is below 1 or the heads do not divide.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    seq_len: int
    tied: bool = False
    gated: bool = True
    positions: bool = False
    name: str = "model"

    def __post_init__(self) -> None:
        for key in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "seq_len"):
            if getattr(self, key) < 1:
                raise BadModel(f"model {self.name}: {key} is {getattr(self, key)}; needs >= 1")
        if self.dim % self.heads:
            raise BadModel(
                f"model {self.name}: dim {self.dim} is no multiple of heads {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise BadModel(
                f"model {self.name}: heads {self.heads} is no multiple of kv_heads {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @cached_property
    def kv_dim(self) -> int:
        """Width of all key heads together (of all value heads alike)."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_matrices(self) -> int:
        """3 for a gated MLP (gate, up, down), 2 for a plain one."""
        return 3 if self.gated else 2

    @cached_property
    def layer_params(self) -> int:
        """Parameters of one layer; norms and biases of a GPT layer included as 13 dim (SC'21)."""
        matrices = (
            2 * self.dim * (self.dim + self.kv_dim) + self.mlp_matrices * self.dim * self.ffn_dim
        )
        small = 2 * self.dim if self.gated else 13 * self.dim
        return matrices + small

    @cached_property
    def embedding_params(self) -> int:
        """Parameters of the token embedding alone."""
        return self.vocab_size * self.dim

    @cached_property
    def params(self) -> int:
        """All parameters. A tied head is counted once."""
        ends = self.embedding_params * (1 if self.tied else 2)
        positions = self.seq_len * self.dim if self.positions else 0
        return self.layers * self.layer_params + ends + positions + self.dim

    def layer_forward_flops(self, causal: bool) -> float:
        """Matrix FLOPs of one layer's forward pass, per token; `causal` halves the attention's."""
        linear = 2.0 * (self.layer_params - (2 if self.gated else 13) * self.dim)
        attention = 4.0 * self.seq_len * self.dim * (0.5 if causal else 1.0)
        return linear + attention

    def flops_per_token(self, causal: bool = False) -> float:
        """Model FLOPs per trained token: 3 x forward, nothing counted twice for recompute.

        Without `causal` this is 72 L h^2 (1 + s/6h + V/12Lh) of SC'21 for a plain GPT.
        """
        head = 2.0 * self.dim * self.vocab_size
        return 3.0 * (self.layers * self.layer_forward_flops(causal) + head)


def model_from_section(section: Mapping[str, object], name: str = "model") -> ModelConfig:
    """The model of a run's `[model]` section.

    Raises BadModel for a key that is unknown (the near one is suggested), missing, or of a wrong
    type.
    """
    known = {f.name: f for f in fields(ModelConfig)}
    values: dict[str, object] = {"name": name}
    for key, value in section.items():
        if key in IGNORED_KEYS:
            continue
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise BadModel(f"[model] {key}: unknown key{hint}")
        wanted = {"int": int, "bool": bool, "str": str}[str(known[key].type)]
        if type(value) is not wanted:
            raise BadModel(f"[model] {key}: expected {wanted.__name__}, found {value!r}")
        values[key] = value
    needed = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "seq_len")
    missing = [key for key in needed if key not in values]
    if missing:
        raise BadModel(f"[model] lacks {', '.join(missing)}")
    return ModelConfig(**values)  # type: ignore[arg-type]  # each value's type was checked above


def gpt(
    name: str, layers: int, dim: int, heads: int, seq_len: int = 2048, vocab_size: int = 51200
) -> ModelConfig:
    """A GPT-2/3 type decoder: MLP of 4 dim, learned positions, tied ends."""
    return ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        ffn_dim=4 * dim,
        seq_len=seq_len,
        tied=True,
        gated=False,
        positions=True,
        name=name,
    )


def llama(
    name: str,
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    ffn_dim: int,
    vocab_size: int = 128256,
    seq_len: int = 8192,
) -> ModelConfig:
    """A Llama type decoder: RMSNorm, RoPE, GQA, SwiGLU, untied ends."""
    return ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        seq_len=seq_len,
        name=name,
    )


def named_models() -> dict[str, ModelConfig]:
    """Published models by name. Sources: the Llama 3 report table 3; SC'21 table 1; OPT, BLOOM."""
    models = (
        llama("llama3-8b", 32, 4096, 32, 8, 14336),
        llama("llama3-70b", 80, 8192, 64, 8, 28672),
        llama("llama3-405b", 126, 16384, 128, 8, 53248),
        llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        gpt("gpt-1.7b", 24, 2304, 24),
        gpt("gpt-3.6b", 30, 3072, 32),
        gpt("gpt-7.5b", 36, 4096, 32),
        gpt("gpt-18.4b", 40, 6144, 48),
        gpt("gpt-22b", 48, 6144, 64),
        gpt("gpt-39.1b", 48, 8192, 64),
        gpt("gpt-76.1b", 60, 10240, 80),
        gpt("gpt-100b", 80, 10240, 80),
        gpt("gpt-145.6b", 80, 12288, 96),
        gpt("gpt3-175b", 96, 12288, 96),
        gpt("gpt-310b", 96, 16384, 128),
        gpt("mt-nlg-530b", 105, 20480, 128),
        gpt("gpt-1t", 128, 25600, 160),
        gpt("bloom-176b", 70, 14336, 112, vocab_size=250880),
    )
    return {model.name: model for model in models}

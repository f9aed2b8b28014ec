"""The model is the Llama of transformers, and its weights depend on (seed, name) only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kit.parity import reference_model
from transformers import LlamaConfig, LlamaForCausalLM

from keepstep.trainer.flops import flops_per_token, parameters, peak_flops, utilisation
from keepstep.trainer.init import initial_weight
from keepstep.trainer.model import Llama, rope_table
from keepstep.trainer.model_config import ModelConfig, NumericsConfig

MODEL = ModelConfig(
    vocab_size=97, dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=80, seq_len=40, rope_theta=5e4
)

_HF_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
}


def _hf_name(name: str) -> str:
    """The name that transformers gives to one of our parameters."""
    whole = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    part = name.removesuffix(".weight")
    if part in whole:
        return whole[part] + ".weight"
    _, layer, rest = part.split(".", 2)
    return f"model.layers.{layer}.{_HF_NAMES[rest]}.weight"


def _hf_twin(config: ModelConfig, model: Llama) -> LlamaForCausalLM:
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            intermediate_size=config.ffn_dim,
            max_position_embeddings=config.seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attn_implementation="eager",
        )
    )
    state = {_hf_name(n): p.detach() for n, p in model.state_dict().items()}
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    return twin.eval()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tied: bool) -> None:
    config = replace(MODEL, tied=tied)
    model = reference_model(NumericsConfig(model=config, seed=3))
    with torch.no_grad():  # norms that are not ones, or a missing scale would not show
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.copy_(torch.linspace(0.5, 1.5, param.numel()))
            else:
                param.mul_(5)
    tokens = torch.randint(0, config.vocab_size, (2, config.seq_len))
    with torch.no_grad():
        ours, theirs = model(tokens), _hf_twin(config, model)(tokens).logits
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_names_are_those_that_checkpoints_use() -> None:
    names = [n for n, _ in Llama(replace(MODEL, layers=1)).named_parameters()]
    assert names == [
        "tok_embeddings.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.wq.weight",
        "layers.0.attention.wk.weight",
        "layers.0.attention.wv.weight",
        "layers.0.attention.wo.weight",
        "layers.0.ffn_norm.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w2.weight",
        "layers.0.feed_forward.w3.weight",
        "norm.weight",
        "output.weight",
    ]


def test_a_stage_keeps_the_names_of_the_whole_model() -> None:
    stage = Llama(MODEL, [1, 2], first=False)
    whole = dict(Llama(MODEL).named_parameters())
    names = {n for n, _ in stage.named_parameters()}
    assert names == {n for n in whole if n.startswith(("layers.1.", "layers.2.", "norm", "output"))}


def test_weights_are_a_function_of_seed_and_name() -> None:
    shape = torch.Size((5, 7))

    def make(name: str, seed: int, config: ModelConfig = MODEL) -> torch.Tensor:
        return initial_weight(name, shape, config, seed)

    one = make("layers.0.attention.wq.weight", 1)
    assert torch.equal(one, make("layers.0.attention.wq.weight", 1))
    assert not torch.equal(one, make("layers.0.attention.wq.weight", 2))
    assert not torch.equal(one, make("layers.1.attention.wq.weight", 1))
    tied = replace(MODEL, tied=True)
    assert torch.equal(make("output.weight", 1, tied), make("tok_embeddings.weight", 1))
    assert not torch.equal(make("output.weight", 1), make("tok_embeddings.weight", 1))


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = reference_model(NumericsConfig(model=MODEL))
    tokens = torch.randint(0, MODEL.vocab_size, (4, MODEL.seq_len))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert abs(loss.item() - torch.tensor(97.0).log().item()) < 0.1


def test_positions_before_a_token_do_not_see_it() -> None:
    model = reference_model(NumericsConfig(model=MODEL))
    tokens = torch.zeros(1, MODEL.seq_len, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 20] = 5
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:20].all()
    assert not same[20]


def test_the_rope_table_is_made_once() -> None:
    arguments = (8, 16, 1e4, torch.float32, torch.device("cpu"))
    assert rope_table(*arguments)[0] is rope_table(*arguments)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_right(tied: bool) -> None:
    config = replace(MODEL, tied=tied)
    assert parameters(config) == sum(p.numel() for p in Llama(config).parameters())


def test_flops_per_token_are_those_counted_by_hand() -> None:
    config = ModelConfig(
        vocab_size=100, dim=8, layers=2, heads=2, kv_heads=1, ffn_dim=16, seq_len=10
    )
    per_layer = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16  # wq, wk, wv, wo, w1, w2, w3
    scores = 2 * 2 * (10 * 4) * 2  # q k^T and p v: 2 matrices, 2 FLOPs, 10 keys of width 4, 2 heads
    assert flops_per_token(config) == 3 * (2 * (2 * per_layer + 100 * 8) + 2 * scores)


def test_utilisation_needs_a_known_peak() -> None:
    assert peak_flops("cpu", "bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert utilisation(MODEL, 1e6, 8, None) is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert utilisation(MODEL, 1e9, 2, 1e15) == flops_per_token(MODEL) * 1e9 / 2e15

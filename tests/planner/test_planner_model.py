"""Model descriptions: their counts against published ones, and what they refuse."""

from __future__ import annotations

import pytest

from keepstep.planner.errors import BadModel
from keepstep.planner.model import gpt, model_from_section, named_models

SECTION = {
    "vocab_size": 256,
    "dim": 64,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 192,
    "seq_len": 128,
    "rope_theta": 1e4,
    "norm_eps": 1e-5,
    "tied": False,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("gpt-1.7b", 1.65),
        ("gpt-3.6b", 3.6),
        ("gpt-18.4b", 18.4),
        ("gpt-39.1b", 39.1),
        ("gpt3-175b", 174.6),
        ("mt-nlg-530b", 529.6),
        ("gpt-1t", 1008.0),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, billions: float) -> None:
    assert named_models()[name].params / 1e9 == pytest.approx(billions, rel=0.012)


def test_flops_of_a_gpt_are_the_formula_of_sc21() -> None:
    layers, hidden, seq, vocab = 96, 12288, 2048, 51200
    model = gpt("g", layers, hidden, 96, seq, vocab)
    bracket = 1 + seq / (6 * hidden) + vocab / (12 * layers * hidden)
    assert model.flops_per_token() == pytest.approx(72 * layers * hidden**2 * bracket, rel=1e-12)


def test_causal_counting_halves_attention_only() -> None:
    model = named_models()["llama3-8b"]
    full, causal = model.flops_per_token(), model.flops_per_token(causal=True)
    assert full - causal == pytest.approx(3 * model.layers * 2 * model.seq_len * model.dim)


def test_a_run_section_makes_a_model_and_ignores_what_has_no_weight() -> None:
    model = model_from_section(SECTION, "demo")
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 192 + 2 * 64
    assert model.params == 4 * layer + 2 * 256 * 64 + 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dimm": 64}, "did you mean dim"),
        ({"dim": "64"}, "expected int"),
        ({"tied": 1}, "expected bool"),
        ({"layers": 0}, "layers is 0"),
        ({"heads": 5}, "no multiple of heads 5"),
        ({"kv_heads": 3}, "no multiple of kv_heads 3"),
    ],
)
def test_a_wrong_section_is_refused_by_key(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BadModel, match=words):
        model_from_section({**SECTION, **changes})


def test_a_section_without_a_needed_key_is_refused() -> None:
    with pytest.raises(BadModel, match="lacks vocab_size"):
        model_from_section({key: SECTION[key] for key in SECTION if key != "vocab_size"})

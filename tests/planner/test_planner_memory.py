"""Memory against the published figures (Korthikanti et al. 2022, in GiB)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.planner.cluster import GIB, cluster_of
from keepstep.planner.layout import Layout
from keepstep.planner.memory import memory
from keepstep.planner.model import named_models
from keepstep.planner.stack import CLASSIC

A100 = cluster_of("A100", 8)
MODELS = named_models()


def layout(tp: int, pp: int, virtual: int, micro: int) -> Layout:
    return Layout(tp=tp, pp=pp, virtual=virtual, micro_batch=micro, zero=0, reduce_bytes=4)


@pytest.mark.parametrize(
    ("name", "shape", "batch", "states", "none", "selective"),
    [
        ("gpt-22b", (8, 1, 1, 4), 4, 45.56, 59.25, 9.56),
        ("gpt3-175b", (8, 8, 3, 1), 64, 45.56, 66.84, 12.35),
        ("mt-nlg-530b", (8, 35, 3, 1), 280, 31.64, 114.02, 23.08),
        ("gpt-1t", (8, 64, 1, 1), 512, 32.96, 131.25, 26.56),
    ],
)
def test_memory_is_within_a_tenth_of_the_published(  # one row of the table each
    name: str,
    shape: tuple[int, int, int, int],
    batch: int,
    states: float,
    none: float,
    selective: float,
) -> None:
    base = layout(*shape)
    plain = memory(MODELS[name], replace(base, sequence_parallel=False), batch, A100, CLASSIC)
    saving = memory(MODELS[name], replace(base, recompute="selective"), batch, A100, CLASSIC)
    found = (plain.weights + plain.gradients + plain.optimizer) / GIB
    assert found == pytest.approx(states, rel=0.10)
    assert plain.activations / GIB == pytest.approx(none, rel=0.01)
    assert saving.activations / GIB == pytest.approx(selective, rel=0.01)


def test_sharding_divides_what_it_says() -> None:
    model = MODELS["llama3-8b"]
    each = [
        memory(model, Layout(dp_shard=8, zero=zero), 64, A100) if zero else None
        for zero in range(4)
    ]
    whole = memory(model, Layout(dp_replicate=8, zero=0), 64, A100)
    one, two, three = each[1], each[2], each[3]
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.optimizer == whole.optimizer / 8
    assert (one.gradients, two.gradients) == (whole.gradients, whole.gradients / 8)
    assert (two.weights, three.weights) == (whole.weights, whole.weights / 8)


def test_arenas_hold_six_images_per_rank_of_a_host() -> None:
    """Three slots of its own and three of one peer, 12 bytes per parameter over all ranks."""
    model = MODELS["llama3-8b"]
    found = memory(model, Layout(dp_shard=8), 64, A100).arenas_per_host
    assert found == pytest.approx(6 * 12 * model.params)

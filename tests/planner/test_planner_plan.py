"""The search: what it refuses and why, what it prefers, and how long it takes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from keepstep.planner.cluster import cluster_of
from keepstep.planner.cost import CostModel
from keepstep.planner.errors import BadLayout
from keepstep.planner.layout import Layout
from keepstep.planner.layouts import Constraints, parse_layout, refusal
from keepstep.planner.model import ModelConfig, named_models
from keepstep.planner.plan import explain_refusal, make_plan, order_note, search, why_first

MODEL = named_models()["llama3-70b"]
H100 = cluster_of("H100", 1024)
BATCH = Constraints(1024)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2048", "needs 2048 GPUs; there are 1024"),
        ("dp=64,tp=16", "tp 16 is more than 8"),
        ("dp=8,tp=3", "heads 64 are no multiple of tp 3"),
        ("pp=128", "128 stages are more than 80 layers"),
        ("pp=4,virtual=3", "80 layers are no multiple of 12 stages"),
        ("dp=3", "global batch 1024 is no multiple of dp 3 x micro batch 1"),
        ("dp=512,pp=2,micro=2", "pp 2 is more than the number of micro batches, 1"),
        ("dp=128,pp=5,virtual=2", "8 micro batches are no multiple of pp 5"),
        ("dp=1,tp=1,pp=1", "GiB per GPU"),
    ],
)
def test_what_cannot_run_has_one_reason_that_names_both_numbers(text: str, words: str) -> None:
    reason = explain_refusal(CostModel(MODEL, H100), parse_layout(text), BATCH)
    assert reason is not None
    assert words in reason


def test_more_heads_than_kv_heads_refuses_by_kv_heads() -> None:
    few = replace(MODEL, kv_heads=2)
    assert refusal(few, H100, Layout(tp=4), BATCH) == "kv heads 2 are no multiple of tp 4"


def test_every_layout_found_can_run_and_uses_every_gpu() -> None:
    costs, found = search(MODEL, cluster_of("H100", 64), Constraints(64))
    assert len(found.ranked) > 100
    for _, layout in found.ranked[::17]:
        assert explain_refusal(costs, layout, Constraints(64)) is None
        assert layout.gpus == 64
    keys = [key for key, _ in found.ranked]
    assert keys == sorted(keys)


def test_every_refused_layout_says_why() -> None:
    _, found = search(MODEL, cluster_of("H100", 64), Constraints(64))
    assert all(one.reason for one in found.refused)
    assert {one.layout.tp for one in found.refused} >= {16}


def test_the_best_ten_differ_in_their_sizes() -> None:
    _, found = search(MODEL, H100, BATCH)
    best = found.best(10)
    assert len({(one.dp, one.tp, one.pp) for one in best}) == len(best) == 10


def test_the_sentence_names_what_the_first_saves() -> None:
    costs, found = search(MODEL, H100, BATCH)
    plans = [make_plan(costs, one, 1024) for one in found.best(2)]
    assert "faster than" in why_first(plans)
    assert "it saves" in why_first(plans)
    assert why_first(plans[:1]).endswith("is the only one that can run.")


def test_hardware_utilisation_counts_recompute_and_model_utilisation_does_not() -> None:
    costs = CostModel(MODEL, H100)
    plan = make_plan(costs, Layout(dp_shard=16, tp=8, pp=8, recompute="full"), 1024)
    layers = MODEL.layers * MODEL.layer_forward_flops(causal=False)
    expected = 1 + layers / MODEL.flops_per_token()
    assert plan.hfu / plan.mfu == pytest.approx(expected)
    assert 0.2 < plan.mfu < 0.6


def test_days_and_dollars_follow_from_tokens_per_second() -> None:
    plan = make_plan(CostModel(MODEL, H100), Layout(dp_shard=16, tp=8, pp=8), 1024)
    days = plan.days(1e12)
    assert days == pytest.approx(1e12 / plan.tokens_per_s / 86400)
    assert plan.dollars(1e12, 2.0) == pytest.approx(days * 24 * 1024 * 2)


def test_a_100b_model_on_1024_gpus_is_searched_within_5_seconds_of_one_core() -> None:
    before = time.process_time()
    _, found = search(named_models()["gpt-100b"], H100, BATCH)
    assert time.process_time() - before <= 5.0
    assert len(found.ranked) > 1000


def test_a_layout_s_text_reads_back_as_itself() -> None:
    layout = Layout(
        dp_replicate=2,
        dp_shard=8,
        tp=4,
        pp=2,
        virtual=2,
        micro_batch=4,
        recompute="selective",
        sequence_parallel=False,
        zero=3,
        reduce_bytes=2,
    )
    assert parse_layout(str(layout)) == layout
    assert parse_layout("") == Layout()


@pytest.mark.parametrize(
    "text", ["dp", "dp=0", "tp=x", "qp=2", "recompute=some", "zero=4", "dp=2x", "sp=maybe"]
)
def test_a_wrong_layout_text_is_refused(text: str) -> None:
    with pytest.raises(BadLayout, match="layout"):
        parse_layout(text)


def test_a_tiny_model_on_one_gpu_has_one_size() -> None:
    tiny = ModelConfig(256, 64, 4, 4, 2, 192, 128)
    _, found = search(tiny, cluster_of("H100", 1), Constraints(16))
    assert {(one.dp, one.tp, one.pp) for one in found.best(10)} == {(1, 1, 1)}


def test_a_faster_layout_below_a_slower_one_is_explained() -> None:
    """512 samples on 256 GPUs have one; 1,024 of them have none."""
    costs, found = search(MODEL, cluster_of("H100", 256), Constraints(512))
    plans = [make_plan(costs, one, 512) for one in found.best(10)]
    seconds = [plan.cost.total_s for plan in plans]
    assert seconds != sorted(seconds)
    note = order_note(plans)
    assert note is not None
    assert "2 %" in note
    by_time = sorted(plans, key=lambda plan: plan.cost.total_s)
    assert order_note(by_time) is None

"""Bytes and rates by hand: the worked 175B example, rings inside and across nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.planner.budget import budget, tokens_to_hide_dp
from keepstep.planner.cluster import Efficiency, cluster_of
from keepstep.planner.comm import axis, boundary_bytes, dp_bytes, step_bytes
from keepstep.planner.cost import CostModel
from keepstep.planner.layout import Layout
from keepstep.planner.model import named_models

GPT3 = named_models()["gpt3-175b"]
WORKED = Layout(dp_shard=16, tp=8, pp=8)
PERFECT = Efficiency(link=1.0, nic=1.0, link_latency_s=0.0, nic_latency_s=0.0)
H100 = replace(cluster_of("H100", 1024), efficiency=PERFECT)


def test_worked_example_dp_moves_10_3_gb_of_gradients_and_5_1_gb_of_weights() -> None:
    held = 175e9 / 64
    gradients = dp_bytes(replace(WORKED, zero=0), held, 1) / 2  # reduce-scatter: half an all-reduce
    both = dp_bytes(WORKED, held, 1)
    assert gradients / 1e9 == pytest.approx(10.3, abs=0.06)
    assert (both - gradients) / 1e9 == pytest.approx(5.1, abs=0.06)
    assert both / 50e9 == pytest.approx(0.31, abs=0.005)


def test_worked_example_the_planner_s_own_bytes_are_those() -> None:
    """The planner counts the real parameters, 174.6 G, and the tied embedding at both ends."""
    sent = step_bytes(GPT3, WORKED, 16)
    assert sent.dp / 1e9 == pytest.approx(15.4, abs=0.1)


def test_worked_example_tp_moves_4_2_gb_per_micro_batch_in_9_4_ms() -> None:
    layers_only = replace(GPT3, layers=96)
    sent = step_bytes(layers_only, WORKED, 16)  # one micro batch per replica
    by_hand = 16 * 2048 * 12288 * 7 / 8 * 12
    ends = 2 / 8 * 2 * 7 / 8 * 2 * 2048 * 12288  # two all-reduces of 2bsh, over eight stages
    assert by_hand / 1e9 == pytest.approx(4.2, abs=0.05)
    assert sent.tp == pytest.approx(by_hand + ends)
    assert axis(H100, 8, 1).all_reduce_s(1.0) * by_hand / (2 * 7 / 8) == pytest.approx(
        9.4e-3, abs=0.1e-3
    )


def test_worked_example_compute_takes_67_ms_at_half_of_the_peak() -> None:
    flops = 3 * 12 * 2048 * GPT3.layer_forward_flops(causal=False) / 8
    assert flops / (0.5 * 989e12) == pytest.approx(67e-3, rel=0.05)


def test_worked_example_a_boundary_moves_6_3_mb() -> None:
    assert boundary_bytes(GPT3, WORKED) / 1e6 == pytest.approx(6.3, abs=0.02)


def test_traffic_hides_from_30000_tokens_per_replica_at_peak() -> None:
    """6/4 of C/W = 989e12 / 50e9; 20,000 with a 2-byte reduction."""
    assert tokens_to_hide_dp(4, 1, 989e12, 50e9) == pytest.approx(29_670)
    assert tokens_to_hide_dp(2, 1, 989e12, 50e9) == pytest.approx(19_780)


@pytest.mark.parametrize(
    ("size", "stride", "gb_per_s"),
    [
        (8, 1, 450.0),  # inside the node
        (16, 8, 50.0),  # one member a node: its eighth of the network
        (16, 4, 100.0),  # two members a node share a ring
        (64, 1, 400.0),  # all members of a node: the whole network
        (16, 1, 400.0),
    ],
)
def test_a_ring_has_the_links_that_its_members_share(
    size: int, stride: int, gb_per_s: float
) -> None:
    assert axis(H100, size, stride).bytes_per_s / 1e9 == pytest.approx(gb_per_s)


def test_zero_stages_move_what_zero_says() -> None:
    held, count = 1e9, 4
    shard = 3 / 4
    base = Layout(dp_shard=4)
    assert dp_bytes(replace(base, zero=1), held, count) == shard * 6e9
    assert dp_bytes(replace(base, zero=2), held, count) == shard * (4 * 4e9 + 2e9)
    assert dp_bytes(replace(base, zero=3), held, count) == shard * 4 * (2e9 + 2e9 + 4e9)
    plain = replace(base, zero=0, dp_shard=1, dp_replicate=4)
    assert dp_bytes(plain, held, count) == 2 * shard * 4e9


def test_replicas_of_shards_all_reduce_their_shard_in_addition() -> None:
    both = Layout(dp_replicate=2, dp_shard=4)
    assert dp_bytes(both, 1e9, 1) == 3 / 4 * 6e9 + 2 * (1 / 2) * 4e9 / 4


def test_virtual_stages_multiply_the_boundaries() -> None:
    plain, looped = Layout(pp=4, tp=8), Layout(pp=4, tp=8, virtual=3)
    model = replace(GPT3, tied=False)
    once, thrice = (step_bytes(model, one, 8).pp for one in (plain, looped))
    assert thrice / once == pytest.approx(11 / 3)


def test_the_budget_repeats_the_cost_s_exposed_seconds_and_says_what_is_left() -> None:
    costs = CostModel(GPT3, cluster_of("H100", 1024))
    cost = costs.step(WORKED, 1024)
    found = budget(costs, WORKED, 1024, cost)
    assert (found.dp.exposed_s, found.tp.exposed_s) == (cost.dp_s, cost.tp_s)
    assert found.tp.headroom == pytest.approx(1 - found.tp.wire_s / found.tp.hide_s)
    nothing = budget(costs, Layout(tp=8), 1024, costs.step(Layout(tp=8), 1024)).pp
    assert (nothing.bytes, nothing.used) == (0.0, 0.0)

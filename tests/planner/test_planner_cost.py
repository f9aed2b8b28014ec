"""The step's parts behave as the mechanisms they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.planner.cluster import (
    CORES,
    GPUS,
    Cluster,
    Efficiency,
    cluster_from_document,
    cluster_of,
)
from keepstep.planner.cost import CostModel, stage_layers
from keepstep.planner.kernels import gemm_s
from keepstep.planner.layout import Layout
from keepstep.planner.model import named_models
from keepstep.planner.stack import CLASSIC, MODERN, SHARED_CORES

A100 = cluster_of("A100", 64)
GPT = named_models()["gpt-18.4b"]
BASE = Layout(dp_shard=4, tp=4, pp=4, micro_batch=2, recompute="full")


def step(layout: Layout, batch: int = 128, classic: bool = True) -> dict[str, float]:
    cost = CostModel(GPT, A100, CLASSIC if classic else MODERN).step(layout, batch)
    return {name: getattr(cost, name) for name in cost.__slots__ if name.endswith("_s")} | {
        "total": cost.total_s
    }


def test_the_parts_add_up_to_the_step() -> None:
    parts = step(BASE)
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)


def test_the_bubble_is_p_minus_1_over_m_of_even_stages() -> None:
    """4 stages, 16 micro batches; the head makes the last stage longer, hence the tolerance."""
    parts = step(BASE)
    ideal = parts["compute_s"] + parts["tp_s"]
    assert parts["bubble_s"] / ideal == pytest.approx(3 / 16, rel=0.05)


def test_virtual_stages_divide_the_bubble_and_multiply_the_sends() -> None:
    plain, looped = step(BASE), step(replace(BASE, virtual=5))
    assert looped["bubble_s"] == pytest.approx(plain["bubble_s"] / 5)
    assert looped["pp_s"] > 3 * plain["pp_s"]


def test_full_recompute_costs_a_third_more_and_selective_little() -> None:
    none, selective, full = (
        step(replace(BASE, recompute=how))["compute_s"] for how in ("none", "selective", "full")
    )
    assert none < selective < full
    assert full / none == pytest.approx(4 / 3, rel=0.03)


def test_overlap_hides_most_of_the_data_axis() -> None:
    assert step(BASE, classic=False)["dp_s"] < 0.6 * step(BASE)["dp_s"]


def test_tensor_parallel_across_nodes_costs_the_network() -> None:
    inside, across = step(replace(BASE, tp=8, dp_shard=2)), step(replace(BASE, tp=16, dp_shard=1))
    assert across["tp_s"] > 1.5 * inside["tp_s"]


def test_a_product_with_one_tile_too_many_pays_a_whole_wave() -> None:
    gpu, reached = GPUS["A100"], Efficiency()
    rows = 128 * 108
    fits = gemm_s(rows, 256, 4096, gpu, reached)
    over = gemm_s(rows + 128, 256, 4096, gpu, reached)
    assert over / fits > 1.3


def test_a_thin_product_takes_as_long_as_memory_needs() -> None:
    gpu, reached = GPUS["A100"], Efficiency()
    seconds = gemm_s(1, 8192, 8192, gpu, reached)
    assert seconds >= 2 * 8192 * 8192 / (gpu.hbm_bytes_per_s * reached.hbm)


def test_uneven_layers_go_to_the_first_stages_and_none_is_lost() -> None:
    assert stage_layers(10, 4, 1) == (3, 3, 2, 2)
    assert stage_layers(10, 2, 2) == (5, 5)
    assert stage_layers(9, 2, 2) == (5, 4)
    assert sum(stage_layers(127, 8, 1)) == 127


def test_ranks_that_share_cores_take_turns() -> None:
    """Eight ranks on two cores: four times the work each, and no bubble."""
    own = replace(A100, nodes=1, gpus_per_node=8)
    shared = replace(own, cores_per_node=2)
    layout = Layout(tp=1, pp=8, micro_batch=1)
    model = named_models()["gpt-1.7b"]
    alone = CostModel(model, own, CLASSIC).step(layout, 8)
    crowded = CostModel(model, shared, CLASSIC).step(layout, 8)
    assert crowded.bubble_s == 0.0
    assert crowded.total_s > 1.5 * alone.total_s
    assert CostModel(model, replace(own, cores_per_node=8), CLASSIC).step(
        layout, 8
    ).total_s == pytest.approx(alone.total_s, rel=0.02)


def two_cores(**constants: float) -> Cluster:
    """Eight ranks' machine on which nothing takes time but what `constants` say."""
    gpu = replace(GPUS["A100"], peak_flops=1e30, hbm_bytes_per_s=1e30, link_bytes_per_s=1e30, sms=0)
    nothing = Efficiency(host_s=0.0, link_latency_s=0.0)
    reached = replace(nothing, **constants)
    one = cluster_of("A100", 8)
    return replace(one, gpu=gpu, cores_per_node=2, efficiency=reached)


def test_on_shared_cores_every_pass_of_every_layer_is_launched() -> None:
    """Four micro batches, two passes, on one of four ranks' cores: two ranks to a core."""
    layout, machine = Layout(dp_shard=4, zero=3), two_cores(host_s=0.0)
    machine = replace(machine, gpu=replace(machine.gpu, peak_flops=1e12))
    slow = replace(machine, efficiency=replace(machine.efficiency, host_s=1e-3))
    free_s, cost_s = (
        CostModel(GPT, one, SHARED_CORES).step(layout, 16).total_s for one in (machine, slow)
    )
    launches = 2 * 4 * 2 * GPT.layers  # a core's
    assert free_s > 1e-3 * launches  # the work does not hide them
    assert cost_s - free_s == pytest.approx(1e-3 * launches)
    no_work = CostModel(GPT, two_cores(host_s=1e-3), SHARED_CORES).step(layout, 16)
    assert no_work.total_s == pytest.approx(1e-3 * launches)


def test_on_shared_cores_every_collective_costs_its_call() -> None:
    """Weights gathered twice per micro batch, gradients scattered once, per layer and the ends."""
    layout = Layout(dp_shard=2, zero=3)
    cost = CostModel(GPT, two_cores(call_s=1e-3), SHARED_CORES).step(layout, 8)
    assert cost.total_s == pytest.approx(1e-3 * (2 * 4 + 1) * (GPT.layers + 1))
    tensor = CostModel(GPT, two_cores(call_s=1e-3), SHARED_CORES).step(Layout(tp=2), 4)
    assert tensor.total_s == pytest.approx(1e-3 * 4 * (8 * GPT.layers + 4))


def test_cores_start_from_constants_of_their_own() -> None:
    cluster = {"nodes": 1, "gpus_per_node": 8, "nic_bytes_per_s": 1e9, "gpu": "A100"}
    shared = {"cluster": {**cluster, "cores_per_node": 2}, "efficiency": {"gemm": 0.3}}
    found = cluster_from_document(shared, "box").efficiency
    assert found == replace(CORES, gemm=0.3)
    assert cluster_from_document({"cluster": cluster}, "node").efficiency == Efficiency()

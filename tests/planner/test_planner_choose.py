"""The layout for what is left: runs, near the old one, quick."""

from __future__ import annotations

import time

import numpy as np
import pytest

from keepstep.planner.choose import Hosts, choose_layout
from keepstep.planner.cluster import cluster_of
from keepstep.planner.cost import CostModel
from keepstep.planner.errors import BadLayout
from keepstep.planner.layout import Layout
from keepstep.planner.layouts import Constraints
from keepstep.planner.model import named_models
from keepstep.planner.movement import moved_bytes
from keepstep.planner.plan import explain_refusal

MODELS = named_models()
MODEL = MODELS["llama3-70b"]
OLD = Layout(dp_shard=64, tp=4, pp=4, micro_batch=1, zero=1)
BATCH = Constraints(1024)


def without(*lost: int, hosts: int = 128) -> Hosts:
    left = tuple(host for host in range(hosts) if host not in lost)
    return Hosts(cluster_of("H100", 8 * len(left)), left)


def test_the_choice_runs_on_what_is_left() -> None:
    hosts = without(3, 77)
    choice = choose_layout(MODEL, hosts, BATCH, OLD)
    costs = CostModel(MODEL, hosts.cluster)
    assert choice.layout.gpus <= 126 * 8
    assert explain_refusal(costs, choice.layout, BATCH) is None
    assert choice.step_s == costs.step(choice.layout, 1024).total_s
    assert "moves" in choice.reason


def test_of_close_layouts_the_one_that_moves_least_wins() -> None:
    model = MODELS["llama3-8b"]
    old = Layout(dp_shard=512, tp=2, micro_batch=2, zero=1)
    choice = choose_layout(model, without(), BATCH, old)
    fastest = choose_layout(model, without(), BATCH)
    assert (choice.layout.dp, choice.layout.tp) == (512, 2)
    assert choice.moved_bytes == 0.0
    assert choice.step_s <= 1.05 * fastest.step_s


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "llama3-405b", "gpt-100b"])
def test_a_choice_for_1024_gpus_takes_at_most_50_ms_of_one_core(name: str) -> None:
    choose_layout(MODELS[name], without(5), BATCH, OLD)
    before = time.process_time()
    choose_layout(MODELS[name], without(5), BATCH, OLD)
    assert time.process_time() - before <= 0.05


def test_too_few_hosts_are_refused_with_the_commonest_reason() -> None:
    with pytest.raises(BadLayout, match="GiB per GPU"):
        choose_layout(MODELS["llama3-405b"], Hosts(cluster_of("H100", 8)), BATCH, OLD)


def test_the_same_layout_on_the_same_hosts_moves_nothing() -> None:
    assert moved_bytes(MODEL, OLD, OLD, tuple(range(128)), 8) == 0.0


def test_a_new_host_in_a_place_needs_what_that_place_held() -> None:
    """The state is split evenly over 128 hosts; the neighbours hold it, the new host nothing."""
    came = tuple(None if host == 9 else host for host in range(128))
    state = 12 * MODEL.params
    assert moved_bytes(MODEL, OLD, OLD, came, 8) == pytest.approx(state / 128, rel=1e-6)


def test_movement_equals_a_count_over_all_cells() -> None:
    """An independent count: (layer, 1/48 of the cut dim) cells as sets, for small layouts."""
    model = MODELS["llama3-8b"]
    old, new = Layout(dp_shard=2, tp=4, pp=2), Layout(dp_shard=3, tp=2, pp=4)
    came = (0, 2, 1, None, 3, 0)  # six hosts of four ranks
    expected = 0.0
    for rank in range(new.gpus):
        place = came[rank // 4]
        need = cells(new, rank)
        have: set[tuple[int, int]] = set()
        if place is not None:
            for host in (place, (place - 1) % 4):
                for slot in range(4):
                    have |= cells(old, host * 4 + slot)
        expected += len(need - have)
    share = 12 * model.params / (model.layers * 48)
    assert moved_bytes(model, old, new, came, 4) == pytest.approx(expected * share)


def cells(layout: Layout, rank: int) -> set[tuple[int, int]]:
    rest, tp = divmod(rank, layout.tp)
    stage, dp = divmod(rest, layout.dp)
    layers = np.array_split(np.arange(32), layout.pp)[stage]
    width = 48 // (layout.tp * layout.dp)
    first = (tp * layout.dp + dp) * width
    return {(int(layer), cell) for layer in layers for cell in range(first, first + width)}

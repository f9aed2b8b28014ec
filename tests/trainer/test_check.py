"""Every layout that cannot work is refused in one sentence that names the two numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from keepstep.trainer.check import check
from keepstep.trainer.device import DeviceError, choose
from keepstep.trainer.layout import coordinates, pp_coordinates, stage_layers, stages_of
from keepstep.trainer.model_config import BatchConfig, ModelConfig, OptimConfig, ParallelConfig
from keepstep.trainer.optim import decays, learning_rate

MODEL = ModelConfig(vocab_size=64, dim=32, layers=4, heads=4, kv_heads=2, ffn_dim=64, seq_len=16)
INTERLEAVED = {"schedule": "interleaved1f1b", "virtual": 2}


def _only(
    numbers: tuple[int, int],
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    batch: tuple[int, int] = (16, 2),
) -> None:
    problems = check(
        replace(MODEL, **(model or {})), ParallelConfig(**(parallel or {})), BatchConfig(*batch)
    )
    # heads that tp does not divide come with kv_heads that it does not divide
    assert len(problems) == (2 if "model.heads" in problems[0] and parallel else 1), problems
    for number in numbers:
        assert str(number) in re.findall(r"\d+", problems[0]), problems


def test_the_defaults_are_accepted_in_3d() -> None:
    parallel = ParallelConfig(dp=2, tp=2, pp=2)
    assert check(ModelConfig(), parallel, BatchConfig(), world_size=8) == []


@pytest.mark.parametrize(
    ("numbers", "model", "parallel"),
    [
        ((6, 4), {"heads": 6, "kv_heads": 6, "dim": 48, "seq_len": 12}, {"tp": 4}),
        ((2, 4), {}, {"tp": 4}),  # kv_heads
        ((66, 4), {"ffn_dim": 66, "kv_heads": 4}, {"tp": 4}),
        ((97, 2), {"vocab_size": 97}, {"tp": 2}),
        ((15, 2), {"seq_len": 15}, {"tp": 2}),
        ((33, 4), {"dim": 33}, {}),
        ((4, 3), {"kv_heads": 3}, {}),
        ((12, 3), {"dim": 12}, {}),  # heads of odd width
        ((3, 4), {"layers": 3}, {"pp": 2, **INTERLEAVED}),
        ((4, 5), {}, {"pp": 5}),
        ((3, 2), {}, {"dp": 3, "dp_replicate": 2}),
        ((2, 1), {}, {"virtual": 2}),
        ((0, 1), {}, {"tp": 0}),
    ],
)
def test_two_numbers_that_do_not_fit(
    numbers: tuple[int, int], model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    dp = parallel.get("dp", 1)
    _only(numbers, model, parallel, batch=(dp * 20, 2))


def test_a_batch_that_ranks_and_micro_batches_do_not_divide() -> None:
    _only((18, 4), parallel={"dp": 2}, batch=(18, 2))


def test_fewer_micro_batches_than_stages_of_the_pipeline() -> None:
    _only((1, 2), parallel={"pp": 2}, batch=(4, 4))


def test_micro_batches_that_rounds_of_the_interleaved_schedule_do_not_divide() -> None:
    _only((5, 2), parallel={"pp": 2, **INTERLEAVED}, batch=(10, 2))


def test_ranks_that_were_started_and_ranks_that_are_needed() -> None:
    problems = check(MODEL, ParallelConfig(dp=2, tp=2), BatchConfig(), world_size=3)
    assert len(problems) == 1
    assert "4 ranks" in problems[0]
    assert "3 were started" in problems[0]


def test_all_problems_are_told_at_once() -> None:
    bad = replace(MODEL, vocab_size=97, seq_len=15)
    assert len(check(bad, ParallelConfig(tp=2, pp=8), BatchConfig(5, 2))) >= 4


@pytest.mark.parametrize("stages", range(1, 11))
def test_stages_hold_every_layer_once(stages: int) -> None:
    split = stage_layers(10, stages)
    assert [layer for stage in split for layer in stage] == list(range(10))
    assert len(split) == stages
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_coordinates_are_row_major_with_tp_fastest() -> None:
    parallel = ParallelConfig(dp=4, dp_replicate=2, tp=2, pp=2)
    seen = [coordinates(parallel, rank) for rank in range(16)]
    mesh = torch.arange(16).reshape(2, 2, 2, 2)
    for rank, at in enumerate(seen):
        assert mesh[at.pp, at.dp_replicate, at.dp_shard, at.tp] == rank
        assert at.dp == at.dp_replicate * 2 + at.dp_shard


def test_every_parameter_is_on_the_ranks_that_run_its_stage() -> None:
    parallel = ParallelConfig(pp=2, schedule="interleaved1f1b", virtual=2)
    assert [stages_of(parallel, rank) for rank in range(2)] == [(0, 2), (1, 3)]
    found = [pp_coordinates(f"layers.{i}.ffn_norm.weight", 4, parallel, False) for i in range(4)]
    assert found == [(0,), (1,), (0,), (1,)]
    assert pp_coordinates("tok_embeddings.weight", 4, parallel, False) == (0,)
    assert pp_coordinates("norm.weight", 4, parallel, True) == (1,)
    assert pp_coordinates("output.weight", 4, parallel, False) == (1,)
    assert pp_coordinates("output.weight", 4, parallel, True) == (0, 1)


def test_the_learning_rate_warms_up_falls_and_stays() -> None:
    optim = OptimConfig(lr=1.0, lr_min_ratio=0.1, warmup_steps=10, schedule_steps=110)
    rates = [learning_rate(step, optim) for step in range(1, 200)]
    assert rates[0] == 0.1
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.55)
    assert rates[109] == pytest.approx(0.1)
    assert set(rates[110:]) == {rates[109]}
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_weight_decay_is_for_matrices() -> None:
    assert decays("layers.0.attention.wq.weight")
    assert decays("tok_embeddings.weight")
    assert not decays("layers.0.attention_norm.weight")
    assert not decays("norm.weight")


def test_a_device_that_is_not_here_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"needs 3 GPUs on this host and found 0"):
        choose("cuda", local_rank=2)
    chosen = choose("auto", local_rank=2)
    assert (chosen.type, chosen.backend, chosen.name()) == ("cpu", "gloo", "cpu")

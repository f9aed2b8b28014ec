"""What a step leaves behind: equal tied weights, no trace of a refused step, layouts that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.parity import CASES, LR, Case, reference, slice_of, whole_batch
from tests.kit.ranks import run_ranks
from torch.distributed.tensor import DTensor

from keepstep.trainer.loss import loss_sum
from keepstep.trainer.mesh import MeshError, make_grid
from keepstep.trainer.model_config import IGNORED, ParallelConfig
from keepstep.trainer.train_step import Trainable, build

Arrays = dict[str, np.ndarray[Any, Any]]


def _local(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone().numpy()


def _weights(trainable: Trainable) -> Arrays:
    return {n: _local(p) for n, p in trainable.parameters.items()}


def _make(case: Case, dtype: str = "fp32", **changes: Any) -> Trainable:  # noqa: ANN401
    grid = make_grid(case.parallel, torch.device("cpu"))
    return build(replace(case.config("fp32"), dtype=dtype, **changes), grid)  # type: ignore[arg-type]


def _tied_rank(rank: int, world: int, case: Case) -> tuple[tuple[int, ...], Arrays]:
    trainable = _make(case)
    for step in range(4):
        trainable.step(slice_of(case, trainable, step), LR)
    place = trainable.grid.place
    ends = ("tok_embeddings.weight", "output.weight")
    return (place.dp_replicate, place.dp_shard, place.tp), {
        n: w for n, w in _weights(trainable).items() if n in ends
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["tied-pp2", "tied-pp4", "tied-dp2-pp2", "tied-dp2-tp2-pp2-interleaved"]
)
def test_a_tied_pair_stays_bitwise_equal_over_four_steps(name: str) -> None:
    case = CASES[name]
    held: dict[tuple[int, ...], Arrays] = {}
    for place, weights in run_ranks(case.parallel.world_size, _tied_rank, case):
        held.setdefault(place, {}).update(weights)
    assert held
    for weights in held.values():
        assert weights["output.weight"].tobytes() == weights["tok_embeddings.weight"].tobytes()


def _same_parameter_rank(rank: int, world: int, case: Case) -> bool:
    trainable = _make(case)
    (model,) = trainable.modules
    trainable.step(slice_of(case, trainable, 0), LR)
    assert model.output is not None
    assert model.tok_embeddings is not None
    same = model.output.weight is model.tok_embeddings.weight
    return same and "output.weight" not in trainable.parameters


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["tied-1", "tied-dp2", "tied-tp2", "tied-dp2-tp2"])
def test_a_tied_pair_without_a_pipeline_is_one_parameter(name: str) -> None:
    case = CASES[name]
    assert all(run_ranks(case.parallel.world_size, _same_parameter_rank, case))


def _refused_rank(rank: int, world: int, case: Case) -> tuple[bool, bool, bool]:
    trainable = _make(case)
    trainable.step(slice_of(case, trainable, 0), LR)
    before = _state(trainable)
    param = next(iter(trainable.parameters.values()))
    with torch.no_grad():  # one rank's weights are poison for one step
        saved = param.detach().clone()
        if rank == world - 1:
            param.fill_(float("nan"))
    poisoned = trainable.step(slice_of(case, trainable, 1), LR)
    with torch.no_grad():
        param.copy_(saved)
    after = _state(trainable)
    same = before.keys() == after.keys() and all(
        before[n].tobytes() == after[n].tobytes() for n in before
    )
    return same, poisoned.applied, trainable.step(slice_of(case, trainable, 2), LR).applied


def _state(trainable: Trainable) -> Arrays:
    found = _weights(trainable)
    for name, param in trainable.parameters.items():
        for key, value in trainable.optimizer.state[param].items():
            found[f"{name}/{key}"] = _local(value)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["accumulation-1", "dp2-tp2", "tied-pp2"])
def test_a_norm_that_is_not_finite_changes_no_bit_on_any_rank(name: str) -> None:
    case = CASES[name]
    for same, poisoned, after in run_ranks(case.parallel.world_size, _refused_rank, case):
        assert same
        assert not poisoned
        assert after


def _evaluating_rank(rank: int, world: int, case: Case) -> tuple[float, list[float], list[float]]:
    quiet, busy = [], []
    trainable = _make(case)
    for step in range(3):
        quiet.append(trainable.step(slice_of(case, trainable, step), LR).loss)
    trainable = _make(case)
    first = trainable.evaluate([slice_of(case, trainable, 0)])
    for step in range(3):
        busy.append(trainable.step(slice_of(case, trainable, step), LR).loss)
        trainable.evaluate([slice_of(case, trainable, 50 + i) for i in range(2)])
    return first, quiet, busy


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dp2", "dp2-tp2", "pp2-interleaved", "tied-dp2-pp2"])
def test_evaluation_gives_the_loss_of_a_step_and_changes_nothing(name: str) -> None:
    case = CASES[name]
    expected = reference(case, "fp32", 1).losses[0]
    for first, quiet, busy in run_ranks(case.parallel.world_size, _evaluating_rank, case):
        assert first == pytest.approx(expected, rel=1e-6)
        assert busy == quiet


def _loading_rank(rank: int, world: int, case: Case) -> tuple[float, float]:
    trainable = _make(case)
    before = trainable.evaluate([slice_of(case, trainable, 0)])
    with torch.no_grad():  # as a restore does: into the local shards
        for name, param in trainable.parameters.items():
            if name.endswith("norm.weight"):
                param.fill_(0.0)
    return before, trainable.evaluate([slice_of(case, trainable, 0)])


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dp2", "dp2-pp2"])
def test_weights_loaded_after_an_evaluation_are_those_that_the_next_one_uses(name: str) -> None:
    case = CASES[name]
    for before, after in run_ranks(case.parallel.world_size, _loading_rank, case):
        assert after == pytest.approx(np.log(case.model.vocab_size), rel=1e-6)
        assert before != after


def _extra_rank(rank: int, world: int, case: Case) -> dict[str, float]:
    trainable = _make(case)
    mine = {"least": ("min", float(rank)), "stop": ("max", float(rank == 1)), "n": ("sum", 1.0)}
    return trainable.step(slice_of(case, trainable, 0), LR, lambda: mine).extra


@pytest.mark.ranks
def test_numbers_of_the_caller_ride_on_the_reduction() -> None:
    for extra in run_ranks(4, _extra_rank, CASES["dp2-pp2"]):
        assert extra == {"least": 0.0, "stop": 1.0, "n": 4.0}


def _bf16_rank(rank: int, world: int, case: Case) -> tuple[list[float], set[str]]:
    trainable = _make(case, "bf16")
    losses = [trainable.step(slice_of(case, trainable, 0), LR).loss for _ in range(3)]
    return losses, {str(p.dtype) for p in trainable.parameters.values()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["accumulation-1", "dp2-tp2-pp2"])
def test_bf16_computes_on_fp32_weights_near_the_fp32_loss(name: str) -> None:
    case = CASES[name]
    expected = reference(case, "fp32", 1).losses[0]
    for losses, dtypes in run_ranks(case.parallel.world_size, _bf16_rank, case):
        assert dtypes == {"torch.float32"}
        assert losses[0] == pytest.approx(expected, rel=2e-3)
        assert losses[2] < losses[0]


def _weights_rank(rank: int, world: int, case: Case) -> Arrays:
    trainable = _make(case)
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().numpy()
        for n, p in trainable.parameters.items()
    }


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dp2-tp2-pp2", "hsdp2x2-tp2", "pp2-interleaved"])
def test_any_layout_starts_from_the_same_bits(name: str) -> None:
    one = run_ranks(1, _weights_rank, CASES["accumulation-1"])[0]
    seen = set()
    for weights in run_ranks(CASES[name].parallel.world_size, _weights_rank, CASES[name]):
        for key, weight in weights.items():
            seen.add(key)
            assert weight.tobytes() == one[key].tobytes(), key
    assert seen == one.keys()


def _bits_rank(rank: int, world: int, case: Case) -> tuple[list[float], dict[str, bytes]]:
    trainable = _make(case)
    losses = [trainable.step(slice_of(case, trainable, s), LR).loss for s in range(4)]
    return losses, {n: a.tobytes() for n, a in _state(trainable).items()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dp2-tp2-pp2", "hsdp2x2", "tied-pp2-interleaved"])
def test_the_same_run_twice_gives_the_same_bits(name: str) -> None:
    world = CASES[name].parallel.world_size
    assert run_ranks(world, _bits_rank, CASES[name]) == run_ranks(world, _bits_rank, CASES[name])


def _place_rank(rank: int, world: int, case: Case) -> list[str]:
    trainable = _make(case)
    before = {n: (p, _pointer(p)) for n, p in trainable.parameters.items()}
    trainable.step(slice_of(case, trainable, 0), LR)
    now = {n: p for module in trainable.modules for n, p in module.named_parameters()}
    return [n for n, (p, at) in before.items() if now[n] is not p or _pointer(p) != at]


def _pointer(param: torch.Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).data_ptr()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dp3-uneven", "tied-dp2-pp2", "tied-dp2-tp2"])
def test_a_step_updates_parameters_in_place(name: str) -> None:
    assert not any(run_ranks(CASES[name].parallel.world_size, _place_rank, CASES[name]))


def _micro_batch_rank(rank: int, world: int, case: Case) -> float:
    return _make(case).step(whole_batch(case, 0), LR).grad_norm


@pytest.mark.ranks
def test_the_size_of_micro_batches_does_not_change_the_gradient() -> None:
    norms = []
    for micro in (1, 2, 4, 8):
        case = CASES["accumulation-1"]
        case = replace(case, batch=replace(case.batch, micro_batch=micro))
        norms += run_ranks(1, _micro_batch_rank, case)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-6)


def _mesh_rank(rank: int, world: int) -> str:
    with pytest.raises(MeshError) as refused:
        make_grid(ParallelConfig(dp=3), torch.device("cpu"))
    grid = make_grid(ParallelConfig(dp=2), torch.device("cpu"))
    assert grid.mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
    return str(refused.value)


@pytest.mark.ranks
def test_a_mesh_has_all_axes_and_refuses_another_number_of_ranks() -> None:
    for message in run_ranks(2, _mesh_rank):
        assert "has 3 ranks and 2 were started" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_that_of_torch_also_for_large_logits(dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 5, 11, dtype=dtype) * 50).requires_grad_()
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 2:] = IGNORED
    mine = loss_sum(logits, labels, None)
    (gradient,) = torch.autograd.grad(mine * 3, logits)
    theirs = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    (expected,) = torch.autograd.grad(theirs * 3, logits)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradient, expected)
    assert mine.dtype == dtype


def test_a_batch_without_valid_tokens_has_no_loss() -> None:
    labels = torch.full((1, 4), IGNORED)
    assert loss_sum(torch.randn(1, 4, 8), labels, None) == 0

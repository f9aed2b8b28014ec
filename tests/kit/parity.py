"""Parity: a layout's losses, gradients and norms against one process that has no parallelism.

The reference is written here anew from plain torch: the whole model, `F.cross_entropy`,
`clip_grad_norm_` and AdamW. It shares with the product only the model file and the initial weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.kit.mutations import mutate
from tests.kit.ranks import run_ranks
from torch.distributed.tensor import DTensor

from keepstep.trainer.check import check
from keepstep.trainer.init import initial_weight
from keepstep.trainer.mesh import make_grid
from keepstep.trainer.model import Llama
from keepstep.trainer.model_config import (
    BatchConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    ParallelConfig,
)
from keepstep.trainer.train_step import Batch, Trainable, build

LR = 1e-3
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Case:
    """One layout. `unequal`: samples have between 1 and all of their tokens valid."""

    name: str
    parallel: ParallelConfig
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            vocab_size=64, dim=32, layers=4, heads=4, kv_heads=2, ffn_dim=64, seq_len=16
        )
    )
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(8, 2))
    unequal: bool = True
    checkpointing: bool = False
    seed: int = 11

    def config(self, dtype: str) -> NumericsConfig:
        """The run's numerics at a dtype."""
        config = NumericsConfig(
            model=self.model,
            parallel=self.parallel,
            batch=self.batch,
            optim=OptimConfig(clip_norm=0.5),
            dtype=dtype,  # type: ignore[arg-type]
            activation_checkpointing=self.checkpointing,
            seed=self.seed,
        )
        assert not check(config.model, config.parallel, config.batch)
        return config


@dataclass(frozen=True)
class Bars:
    """The largest relative errors allowed."""

    loss: float
    gradient: float
    norm: float
    losses: float


BARS = {
    "fp32": Bars(loss=1e-6, gradient=5e-6, norm=1e-6, losses=5e-6),
    "fp64": Bars(loss=1e-12, gradient=1e-12, norm=1e-12, losses=1e-12),
}


class ParityBroken(AssertionError):
    """A layout computes something else than one process does."""


@dataclass
class Run:
    """What a run came to: per step, and the whole gradients of step 1 before clipping."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray[Any, Any]]


def whole_batch(case: Case, step: int) -> Batch:
    """The global batch of a step, a function of (seed, step)."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    shape = (case.batch.global_batch, case.model.seq_len + 1)
    tokens = torch.randint(0, case.model.vocab_size, shape, generator=generator)
    labels = tokens[:, 1:].clone()
    if case.unequal:
        for row in labels[::2]:
            valid = int(torch.randint(1, case.model.seq_len + 1, (), generator=generator))
            row[valid:] = -100
    return Batch(tokens[:, :-1].contiguous(), labels)


def reference_model(config: NumericsConfig) -> Llama:
    """The whole model with the run's initial weights."""
    model = Llama(config.model).to(DTYPES[config.dtype])
    model.tie()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(initial_weight(name, param.shape, config.model, config.seed))
    return model


def reference(case: Case, dtype: str, steps: int) -> Run:
    """The same steps in this process, by plain torch."""
    config = case.config(dtype)
    model = reference_model(config)
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2]
    norms = [p for n, p in named.items() if p.dim() == 1]
    optim = config.optim
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    run = Run([], [], {})
    for step in range(steps):
        batch = whole_batch(case, step)
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            run.gradients = {n: _array(p.grad) for n, p in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), optim.clip_norm)
        optimizer.step()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    return run


def distributed(case: Case, dtype: str, steps: int, mutation: str = "") -> Run:
    """The same steps by the product, on gloo ranks."""
    world = case.parallel.world_size
    runs = run_ranks(world, _rank, case, dtype, steps, mutation, timeout_s=240)
    gradients: dict[str, np.ndarray[Any, Any]] = {}
    for run in runs:
        for name, gradient in run.gradients.items():
            _check_copy(name, gradients.setdefault(name, gradient), gradient)
    for run in runs[1:]:
        if (run.losses, run.norms) != (runs[0].losses, runs[0].norms):
            raise ParityBroken(f"ranks disagree: {runs[0].losses} and {run.losses}")
    return Run(runs[0].losses, runs[0].norms, gradients)


def _check_copy(name: str, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    if not np.array_equal(one, other):
        raise ParityBroken(f"copies of the gradient of {name} differ between ranks")


def _rank(rank: int, world: int, case: Case, dtype: str, steps: int, mutation: str) -> Run:
    config = case.config(dtype)
    grid = make_grid(config.parallel, torch.device("cpu"))
    trainable = build(config, grid)
    mutate(mutation, trainable)
    trainable.backward(slice_of(case, trainable, 0))
    run = Run([], [], whole_gradients(trainable))
    trainable.optimizer.zero_grad()
    for step in range(steps):
        numbers = trainable.step(slice_of(case, trainable, step), LR)
        run.losses.append(numbers.loss)
        run.norms.append(numbers.grad_norm)
    return run


def slice_of(case: Case, trainable: Trainable, step: int) -> Batch:
    """A rank's slice of a step's batch: the contiguous share of its dp coordinate."""
    batch = whole_batch(case, step)
    each = case.batch.global_batch // case.parallel.dp
    start = trainable.grid.place.dp * each
    return Batch(batch.inputs[start : start + each], batch.labels[start : start + each])


def whole_gradients(trainable: Trainable) -> dict[str, np.ndarray[Any, Any]]:
    """This rank's stages' gradients, gathered over dp and tp; a tied output under its own name."""
    gathered = {}
    for name, param in trainable.parameters.items():
        grad = param.grad
        if grad is None:
            continue
        gathered[trainable.canonical_name(name)] = _array(
            grad.full_tensor() if isinstance(grad, DTensor) else grad
        )
    dist.barrier()
    return gathered


def _array(tensor: torch.Tensor | None) -> np.ndarray[Any, Any]:
    assert tensor is not None
    return tensor.detach().clone().numpy()


def relative(found: float, expected: float) -> float:
    """Relative error; infinite for what is not a number."""
    error = abs(found - expected) / abs(expected)
    return error if np.isfinite(error) else float("inf")


def errors(found: Run, expected: Run) -> dict[str, float]:
    """The worst relative errors: loss and norm of step 1, gradients of their max, later losses."""
    if found.gradients.keys() != expected.gradients.keys():
        odd = sorted(found.gradients.keys() ^ expected.gradients.keys())
        raise ParityBroken(f"gradients are missing or invented: {odd}")
    gradient = max(
        float(np.abs(found.gradients[n] - g).max() / np.abs(g).max())
        for n, g in expected.gradients.items()
    )
    pairs: Sequence[tuple[float, float]] = list(zip(found.losses, expected.losses, strict=True))
    return {
        "loss": relative(*pairs[0]),
        "gradient": gradient,
        "norm": relative(found.norms[0], expected.norms[0]),
        "losses": max(relative(*pair) for pair in pairs),
    }


def check_parity(case: Case, dtype: str, steps: int, mutation: str = "") -> dict[str, float]:
    """The errors of a case, all within the bars.

    Raises:
        ParityBroken: the first error above its bar, with the number and the bar.
    """
    worst = errors(distributed(case, dtype, steps, mutation), reference(case, dtype, steps))
    for what, error in worst.items():
        bar = getattr(BARS[dtype], what)
        if not error <= bar:
            raise ParityBroken(f"{case.name} {dtype}: {what} is off by {error:.2g}, bar {bar:.0e}")
    return worst


_BASE = ModelConfig(vocab_size=64, dim=32, layers=4, heads=4, kv_heads=2, ffn_dim=64, seq_len=16)
_TIED = replace(_BASE, tied=True)
_MQA = replace(_BASE, heads=8, kv_heads=4)
_MHA = replace(_BASE, kv_heads=4)
_DEEP = replace(_BASE, layers=5)


def _case(
    name: str,
    model: ModelConfig = _BASE,
    batch: tuple[int, int] = (8, 2),
    **parallel: Any,  # noqa: ANN401
) -> Case:
    return Case(name, ParallelConfig(**parallel), model, BatchConfig(*batch))


_INTERLEAVED = {"schedule": "interleaved1f1b", "virtual": 2}

# Every axis alone and together, both schedules, tied and untied, GQA, accumulation, HSDP; the valid
# tokens of the samples are unequal in all of them.
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("dp2", dp=2),
        _case("dp3-uneven", batch=(6, 1), dp=3),
        _case("dp4", batch=(8, 1), dp=4),
        _case("dp2-replicas", dp=2, dp_replicate=2),
        _case("hsdp2x2", dp=4, dp_replicate=2),
        _case("tp2", tp=2),
        _case("tp2-mha", _MHA, tp=2),
        _case("tp4-gqa8:4", _MQA, tp=4),
        _case("pp2", pp=2),
        _case("pp2-uneven", _DEEP, pp=2),
        _case("pp4", pp=4),
        _case("pp2-interleaved", pp=2, **_INTERLEAVED),
        _case("accumulation-1", batch=(8, 2), dp=1),
        _case("dp2-accumulation-4", batch=(8, 1), dp=2),
        _case("tp2-accumulation-8", batch=(8, 1), tp=2),
        _case("tied-1", _TIED, dp=1),
        _case("tied-dp2", _TIED, dp=2),
        _case("tied-tp2", _TIED, tp=2),
        _case("tied-dp2-tp2", _TIED, dp=2, tp=2),
        _case("tied-pp2", _TIED, pp=2),
        _case("tied-pp4", _TIED, pp=4),
        _case("tied-dp2-pp2", _TIED, dp=2, pp=2),
        _case("tied-pp2-interleaved", _TIED, pp=2, **_INTERLEAVED),
        _case("dp2-tp2", dp=2, tp=2),
        _case("dp2-pp2", dp=2, pp=2),
        _case("tp2-pp2", tp=2, pp=2),
        _case("dp2-pp2-interleaved", dp=2, pp=2, **_INTERLEAVED),
        _case("dp2-tp2-pp2", dp=2, tp=2, pp=2),
        _case("dp2-tp2-pp2-interleaved", dp=2, tp=2, pp=2, **_INTERLEAVED),
        _case("tied-dp2-tp2-pp2", _TIED, dp=2, tp=2, pp=2),
        _case("tied-dp2-tp2-pp2-interleaved", _TIED, dp=2, tp=2, pp=2, **_INTERLEAVED),
        _case("hsdp2x2-tp2", dp=4, dp_replicate=2, tp=2),
        _case("tied-hsdp2x2-pp2", _TIED, dp=4, dp_replicate=2, pp=2, batch=(8, 1)),
        replace(_case("dp2-tp2-checkpointing", dp=2, tp=2), checkpointing=True),
        replace(_case("dp2-pp2-checkpointing", dp=2, pp=2), checkpointing=True),
    )
}

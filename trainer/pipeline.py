"""Forward and backward of one step: through a pipeline's schedule, or as a loop over micro-batches.

Both runners give the same gradients. The loss of each micro-batch is its sum over valid tokens
divided by the number of valid tokens of the whole step, so gradients only ever add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

from keepstep.trainer import loss
from keepstep.trainer.mesh import Grid
from keepstep.trainer.model import Llama
from keepstep.trainer.model_config import NumericsConfig
from keepstep.trainer.parallel import COMPUTE_DTYPE


class Runner(Protocol):
    """What runs the micro-batches of this rank's slice of a batch."""

    def train(self, inputs: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """Forward and backward of all micro-batches: gradients added to .grad.

        `valid`: the step's number of valid tokens on all ranks. Returns this rank's share of the
        loss, 0-d fp64 on the device; 0 on a rank that has no last stage.
        """

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Forward only: this rank's sum of losses, 0-d fp64 (0 without the last stage)."""


class Accumulation:
    """A whole model on each rank of the pipeline axis's only coordinate: a plain loop."""

    def __init__(self, model: Llama, grid: Grid, micro_batch: int) -> None:
        self._model, self._micro_batch = model, micro_batch
        self._tp = grid.group("tp") if grid.parallel.tp > 1 else None

    def train(self, inputs: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """See Runner. Gradients are reduced over dp with the last micro-batch only."""
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        parts = list(self._parts(inputs, labels))
        for index, (x, y) in enumerate(parts):
            if isinstance(self._model, FSDPModule):
                last = index == len(parts) - 1
                self._model.set_requires_gradient_sync(last)
                self._model.set_is_last_backward(last)
            part = loss.loss_sum(self._model(x), y, self._tp) / valid
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach()
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """See Runner."""
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for x, y in self._parts(inputs, labels):
            total += loss.loss_sum(self._model(x), y, self._tp)
        release(self._model)
        return total

    def _parts(self, inputs: Tensor, labels: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        size = self._micro_batch
        return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))


class Pipelined:
    """The stages of this rank under 1F1B or Interleaved1F1B, with shapes known in advance."""

    def __init__(
        self, modules: Sequence[tuple[int, Llama]], grid: Grid, config: NumericsConfig
    ) -> None:
        self._modules = [module for _, module in modules]
        self._tp = grid.group("tp") if grid.parallel.tp > 1 else None
        self._valid = torch.ones((), device=grid.device)
        self._is_first = any(index == 0 for index, _ in modules)
        self._is_last = any(index == grid.parallel.stages - 1 for index, _ in modules)
        self._device = grid.device
        stages: list[_PipelineStageBase] = [_stage(i, m, grid, config) for i, m in modules]
        micro_batches = config.batch.micro_batches(grid.parallel.dp)
        # scale_grads would divide by the micro-batches again: the loss is normalised already.
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B
        if config.parallel.schedule == "1f1b":
            self._schedule = Schedule1F1B(
                stages[0], micro_batches, loss_fn=self._loss, scale_grads=False
            )
        else:
            self._schedule = ScheduleInterleaved1F1B(
                stages, micro_batches, loss_fn=self._loss, scale_grads=False
            )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return loss.loss_sum(logits, labels, self._tp) / self._valid

    def train(self, inputs: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """See Runner."""
        self._valid = valid
        losses: list[Tensor] = []
        arguments = (inputs,) if self._is_first else ()
        target = labels if self._is_last else None
        self._schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        return self._total(losses)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """See Runner."""
        self._valid = torch.ones((), device=self._device)
        losses: list[Tensor] = []
        arguments = (inputs,) if self._is_first else ()
        target = labels if self._is_last else None
        self._schedule.eval(*arguments, target=target, losses=losses, return_outputs=False)
        for module in self._modules:
            release(module)
        return self._total(losses)

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([part.detach() for part in losses]).double().sum()


def release(model: Llama) -> None:
    """Give gathered parameters back, so that no later forward uses them after a change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def make_runner(modules: Sequence[tuple[int, Llama]], grid: Grid, config: NumericsConfig) -> Runner:
    """The runner for a layout. `modules`: (stage index, module) of this rank, ascending."""
    if config.parallel.pp > 1:
        return Pipelined(modules, grid, config)
    return Accumulation(modules[0][1], grid, config.batch.micro_batch)


def _stage(index: int, module: Llama, grid: Grid, config: NumericsConfig) -> PipelineStage:
    """A stage with static shapes: torch's own inference would run a step and clear gradients."""
    size, model = config.batch.micro_batch, config.model
    stages = config.parallel.stages
    tokens = torch.empty(size, model.seq_len, dtype=torch.int64, device="meta")
    stream = torch.empty(
        size,
        model.seq_len // config.parallel.tp,
        model.dim,
        dtype=COMPUTE_DTYPE[config.dtype],
        device="meta",
        requires_grad=True,  # else the schedule expects no gradient of it
    )
    logits = stream.new_empty(size, model.seq_len, model.vocab_size // config.parallel.tp)
    group: dist.ProcessGroup = grid.group("pp")
    return PipelineStage(
        module,
        index,
        stages,
        grid.device,
        input_args=tokens if index == 0 else stream,
        output_args=logits if index == stages - 1 else stream,
        group=group,
    )

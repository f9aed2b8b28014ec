"""One rank's trainable model, and one step of it; the same few calls in every layout.

A step: count the valid tokens over dp; forward and backward of all micro-batches; add up what no
part of torch adds (norm weights over tp, the tied pair over its two ends); one small reduction that
gives every rank the same loss, norm and bytes; clip; the gated optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from keepstep.trainer import loss, norm, tied
from keepstep.trainer.comm import AXES, Meter
from keepstep.trainer.init import initialize
from keepstep.trainer.layout import pp_coordinates, stage_layers, stages_of
from keepstep.trainer.mesh import Grid
from keepstep.trainer.model import Llama
from keepstep.trainer.model_config import NumericsConfig
from keepstep.trainer.optim import apply_gated, make_optimizer
from keepstep.trainer.parallel import MASTER_DTYPE, lay_out
from keepstep.trainer.pipeline import make_runner
from keepstep.trainer.reduction import Entry, Operation, reduce_entries, reduction_bytes


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's slice of a batch: int64 [samples, seq_len] each.

    labels are already shifted (labels[b, s] follows inputs[b, s]); IGNORED (-100) marks positions
    that are not part of the loss. All ranks of one dp coordinate are given the same slice.
    """

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class StepNumbers:
    """What a step came to; the same on all ranks.

    loss: mean over the valid tokens of all ranks. grad_norm: of the whole gradient, before
    clipping. tokens: valid tokens. applied: False if the norm was not finite, and then no parameter
    or optimizer state changed. comm_bytes: bytes sent per axis, summed over ranks. extra: the
    caller's entries, reduced over all ranks.
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool
    comm_bytes: dict[str, int]
    extra: dict[str, float]


class Trainable:
    """The stages of this rank with their optimizer. Made by `build`."""

    def __init__(self, config: NumericsConfig, grid: Grid, stages: list[tuple[int, Llama]]) -> None:
        self.config, self.grid = config, grid
        self.modules: list[Llama] = [module for _, module in stages]
        self.parameters: dict[str, nn.Parameter] = dict(
            chain.from_iterable(module.named_parameters() for module in self.modules)
        )
        self.optimizer = make_optimizer(self.parameters.items(), config.optim)
        self._runner = make_runner(stages, grid, config)
        self._tied_pair = config.model.tied and config.parallel.pp > 1
        self._ends = tied.ends_group(grid) if self._tied_pair else None
        self._dp = grid.group("dp") if config.parallel.dp > 1 else None
        self._axes = grid.reduction_axes()
        self.meter = Meter(self._group_axes())

    def canonical_name(self, name: str) -> str:
        """The name under which a parameter is stored: a tied output is the embedding."""
        if self.config.model.tied and name == "output.weight":
            return "tok_embeddings.weight"
        return name

    def pp_coordinates(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a parameter, ascending."""
        model = self.config.model
        return pp_coordinates(name, model.layers, self.config.parallel, model.tied)

    def step(
        self, batch: Batch, lr: float, extra: Callable[[], Mapping[str, Entry]] = dict
    ) -> StepNumbers:
        """One optimizer step at rate `lr`. Collective over all ranks.

        `extra`: numbers of the caller that ride on the step's reduction, each with its operation,
        asked for when the gradients are complete; all ranks must give the same names and
        operations.
        """
        with self.meter.counting():
            share, valid = self.backward(batch)
        entries = dict(extra())
        totals = self._reduce(share, entries)
        with self.meter.counting():  # nothing is sent here; if it were, the next step would show it
            total_norm = totals[1].sqrt()
            norm.clip_(self._gradients(self.parameters), total_norm, self.config.optim.clip_norm)
            apply_gated(self.optimizer, lr, (~total_norm.isfinite()).float())
            self.optimizer.zero_grad()
        numbers = [*totals.tolist(), float(valid)]  # the step's only wait for the device
        return _step_numbers(numbers, list(entries))

    def backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Complete gradients in .grad of every parameter: of the mean over all valid tokens.

        Returns this rank's share of the loss (fp64; the shares of all ranks add up to it) and the
        number of valid tokens of all ranks. Collective over all ranks.
        """
        inputs, labels = (t.to(self.grid.device) for t in (batch.inputs, batch.labels))
        valid = loss.count_valid(labels, self._dp)
        share = self._runner.train(inputs, labels, valid)
        if self.config.parallel.tp > 1:
            norms = {n: p for n, p in self.parameters.items() if n.endswith("norm.weight")}
            norm.sum_norm_gradients(self._gradients(norms), self.grid.group("tp"))
        if self._ends is not None:
            pair = ("tok_embeddings.weight", "output.weight")
            ends = {n: p for n, p in self.parameters.items() if n in pair}
            for gradient in self._gradients(ends):
                tied.sum_gradients(gradient, self._ends)
        return share * (self.grid.place.tp == 0), valid

    def squared_norm(self) -> Tensor:
        """This rank's share of the gradient's squared norm: all ranks' shares add up to it."""
        counted = {n: p for n, p in self.parameters.items() if self._counts(n, p)}
        return norm.squared_norm(self._gradients(counted), self.grid.device)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss over all valid tokens of held-out batches; nothing changes.

        Each batch is this dp coordinate's slice, of the training batch's shape. Collective.
        """
        device = self.grid.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in batches:
            inputs, labels = batch.inputs.to(device), batch.labels.to(device)
            total[0] += self._runner.evaluate(inputs, labels) * (self.grid.place.tp == 0)
            here = self.grid.place.tp == 0 and self.grid.place.pp == 0
            total[1] += loss.count_valid(labels, None) * here
        losses, tokens = reduce_entries(total, ("sum", "sum"), self._axes).tolist()
        return float(losses / tokens)

    def _reduce(self, share: Tensor, extra: Mapping[str, Entry]) -> Tensor:
        """[loss, squared norm, bytes per axis of AXES, extra...] over all ranks, fp64."""
        operations: list[Operation] = ["sum"] * (2 + len(AXES))
        operations += [operation for operation, _ in extra.values()]
        sent = self.meter.take()
        for axis, size_bytes in reduction_bytes(len(operations), self._axes).items():
            sent[axis] += size_bytes
        plain = [sent[axis] for axis in AXES] + [value for _, value in extra.values()]
        values = torch.tensor(plain, dtype=torch.float64, device=self.grid.device)
        values = torch.cat((torch.stack((share, self.squared_norm())), values))
        return reduce_entries(values, operations, self._axes)

    def _gradients(self, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
        found = (norm.local_gradient(p) for p in parameters.values())
        return [gradient for gradient in found if gradient is not None]

    def _counts(self, name: str, param: nn.Parameter) -> bool:
        if self._tied_pair and name == "output.weight":
            return False  # the first stage counts the pair, once
        return norm.counts_here(param, self.grid.place)

    def _group_axes(self) -> dict[tuple[int, ...], str]:
        axes = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "dp", "tp": "tp", "dp": "dp"}
        parallel = self.config.parallel
        sizes = {**vars(parallel), "dp_shard": parallel.dp_shard}
        groups = [(self.grid.group(name), axis) for name, axis in axes.items() if sizes[name] > 1]
        if self._ends is not None:
            groups.append((self._ends, "pp"))
        return {tuple(sorted(get_process_group_ranks(group))): axis for group, axis in groups}


def build(config: NumericsConfig, grid: Grid) -> Trainable:
    """Make this rank's stages, with their initial weights, and the optimizer. Collective.

    The layout must have passed `check.check`. Weights depend on (seed, name) only.
    """
    layers = stage_layers(config.model.layers, config.parallel.stages)
    stages: list[tuple[int, Llama]] = []
    for index in stages_of(config.parallel, grid.place.pp):
        with torch.device("meta"):
            stage = Llama(
                config.model, layers[index], first=index == 0, last=index == len(layers) - 1
            ).to(MASTER_DTYPE[config.dtype])
        stage.tie()  # .to may have made two parameters of one
        lay_out(stage, grid, config)
        stage.to_empty(device=grid.device)
        stage.tie()
        initialize(stage, config.model, config.seed)
        stages.append((index, stage))
    return Trainable(config, grid, stages)


def _step_numbers(numbers: list[float], names: list[str]) -> StepNumbers:
    loss_mean, squares, *rest, tokens = numbers
    return StepNumbers(
        loss=loss_mean,
        grad_norm=math.sqrt(squares),
        tokens=round(tokens),
        applied=math.isfinite(squares),
        comm_bytes={axis: round(rest[k]) for k, axis in enumerate(AXES)},
        extra=dict(zip(names, rest[len(AXES) :], strict=True)),
    )

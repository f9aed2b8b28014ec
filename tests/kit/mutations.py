"""Each mutation removes one collective from a running rank, as a bug would: parity must then break.

A removed collective does locally what keeps shapes right: a reduction keeps this rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from keepstep.trainer import loss, norm, tied
from keepstep.trainer.model_config import IGNORED
from keepstep.trainer.train_step import Trainable


class _Done:
    """A collective that never was."""

    def wait(self, *_: object) -> bool:
        return True


def _keep_own_chunk(trainable: Trainable) -> None:
    """fsdp's reduce-scatter over dp_shard."""

    def reduce_scatter(group: ProcessGroup, out: Tensor, whole: Tensor, *_: object) -> _Done:
        out.copy_(whole.chunk(group.size())[group.rank()])
        return _Done()

    for method in ("reduce_scatter_single", "_reduce_scatter_base"):
        setattr(ProcessGroup, method, reduce_scatter)


def _silence_all_reduce(axis: str) -> Callable[[Trainable], None]:
    """All-reduces on one axis's group, except those of integers (token counts)."""

    def apply(trainable: Trainable) -> None:
        name = trainable.grid.group(axis).group_name
        original = ProcessGroup.allreduce

        def allreduce(group: ProcessGroup, tensors: Any, *rest: Any) -> Any:  # noqa: ANN401
            first = tensors[0] if isinstance(tensors, list) else tensors
            if group.group_name == name and first.is_floating_point():
                return _Done()
            return original(group, tensors, *rest)

        ProcessGroup.allreduce = allreduce  # type: ignore[method-assign,assignment]

    return apply


def _silence_reduction(axis: str) -> Callable[[Trainable], None]:
    """One axis of the step's small reduction: loss, norm, bytes."""

    def apply(trainable: Trainable) -> None:
        trainable._axes = [(name, group) for name, group in trainable._axes if name != axis]

    return apply


def _own_count(_: Trainable) -> None:
    original = loss.count_valid
    loss.count_valid = lambda labels, group: original(labels, None)


def _no_norm_sum(_: Trainable) -> None:
    norm.sum_norm_gradients = lambda gradients, group: None


def _no_tied_sum(_: Trainable) -> None:
    tied.sum_gradients = lambda gradient, group: None


def _count_pair_twice(trainable: Trainable) -> None:
    trainable._counts = lambda name, param: norm.counts_here(  # type: ignore[method-assign]
        param, trainable.grid.place
    )


def _count_everywhere(_: Trainable) -> None:
    norm.counts_here = lambda param, place: True


def _never_sync(_: Trainable) -> None:
    original = FSDPModule.set_requires_gradient_sync

    def never(module: FSDPModule, *_: object, **__: object) -> None:
        original(module, False)

    FSDPModule.set_requires_gradient_sync = never  # type: ignore[method-assign,assignment]


def _no_scatter_sum(_: Trainable) -> None:
    """The sum of row-parallel partial results (and of column-parallel input gradients) over tp."""

    def own_chunk(x: Tensor, _op: str, size: int, group: Any) -> Tensor:  # noqa: ANN401
        found = group
        if isinstance(group, str):
            found = torch._C._distributed_c10d._resolve_process_group(group)
        return x.chunk(size)[found.rank()].clone()

    torch.ops._c10d_functional.reduce_scatter_tensor = own_chunk


def _send_zeros(_: Trainable) -> None:
    """What a stage sends to its neighbour arrives as zeros."""
    original = ProcessGroup.send

    def send(group: ProcessGroup, tensors: list[Tensor], *rest: Any) -> Any:  # noqa: ANN401
        floating = tensors[0].is_floating_point()
        return original(group, [torch.zeros_like(t) if floating else t for t in tensors], *rest)

    ProcessGroup.send = send  # type: ignore[method-assign,assignment]


def _mean_of_micro_batches(_: Trainable) -> None:
    """Each micro-batch divides by its own number of tokens."""
    original = loss.loss_sum

    def mean(logits: Tensor, labels: Tensor, group: ProcessGroup | None) -> Tensor:
        return original(logits, labels, group) / (labels != IGNORED).sum() * labels.numel()

    loss.loss_sum = mean


_MUTATIONS: dict[str, Callable[[Trainable], None]] = {
    "": lambda trainable: None,
    "dp gradient reduce-scatter": _keep_own_chunk,
    "replica gradient all-reduce": _silence_all_reduce("dp_replicate"),
    "gradient sync on the last micro-batch": _never_sync,
    "token count all-reduce": _own_count,
    "one token count for all micro-batches": _mean_of_micro_batches,
    "norm weights' gradient sum over tp": _no_norm_sum,
    "tp reduce-scatter of partial sums": _no_scatter_sum,
    "loss all-reduces over tp": _silence_all_reduce("tp"),
    "tied gradient sum": _no_tied_sum,
    "tied pair counted once": _count_pair_twice,
    "replicated weights counted once": _count_everywhere,
    "pipeline sends": _send_zeros,
    "step reduction over dp": _silence_reduction("dp"),
    "step reduction over tp": _silence_reduction("tp"),
    "step reduction over pp": _silence_reduction("pp"),
}
NAMES = tuple(name for name in _MUTATIONS if name)

# (case, what is removed from it): the collective that the case's parity test guards.
GUARDS = (
    ("dp2", "dp gradient reduce-scatter"),
    ("dp2-replicas", "replica gradient all-reduce"),
    ("hsdp2x2", "replica gradient all-reduce"),
    ("dp2-accumulation-4", "gradient sync on the last micro-batch"),
    ("dp2", "token count all-reduce"),
    ("accumulation-1", "one token count for all micro-batches"),
    ("dp2-accumulation-4", "one token count for all micro-batches"),
    ("tp2", "norm weights' gradient sum over tp"),
    ("tp2", "tp reduce-scatter of partial sums"),
    ("tp2", "loss all-reduces over tp"),
    ("tied-pp2", "tied gradient sum"),
    ("tied-pp2-interleaved", "tied gradient sum"),
    ("tied-pp2", "tied pair counted once"),
    ("tp2", "replicated weights counted once"),
    ("dp2-replicas", "replicated weights counted once"),
    ("pp2", "pipeline sends"),
    ("pp2-interleaved", "pipeline sends"),
    ("dp2", "step reduction over dp"),
    ("tp2", "step reduction over tp"),
    ("pp2", "step reduction over pp"),
)


def mutate(name: str, trainable: Trainable) -> None:
    """Remove the named collective from this process ("" removes none). Not undone: ranks die."""
    _MUTATIONS[name](trainable)

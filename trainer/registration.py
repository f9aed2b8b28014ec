"""What a run's state consists of: model, optimizer, position, RNG, and what describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep.ckpt.layout import layout_values, mesh_of
from keepstep.ckpt.placement import Pin
from keepstep.ckpt.registry import Registry
from keepstep.trainer.job import Job
from keepstep.trainer.layout import stage_layers
from keepstep.trainer.order import Skipped
from keepstep.trainer.train_step import Trainable

TIED_NAME, TIED_TO = "output.weight", "tok_embeddings.weight"


@dataclass(slots=True)
class Position:
    """Where a run stands: finished steps, next global sample index, ranges passed over."""

    step: int = 0
    cursor: int = 0
    skipped: list[list[int]] = field(default_factory=list)

    def skipped_ranges(self) -> Skipped:
        """The skip list as `order.take` wants it."""
        return tuple((first, end) for first, end in self.skipped)


def register(trainable: Trainable, position: Position, job: Job, rank: int) -> Registry:
    """Register all of this rank's state, under names that are the same in every layout.

    The optimizer's state is made to exist, at no change of value.
    """
    registry = Registry(mesh_of(job.layout), rank)
    _add_modules(registry, trainable, job)
    registry.add_optimizer("optimizer/", trainable.optimizer)
    _add_position(registry, position)
    _add_description(registry, job)
    registry.add_rank_tensor("rng/cpu", torch.get_rng_state, torch.set_rng_state)
    if trainable.grid.device.type == "cuda":
        registry.add_rank_tensor("rng/cuda", torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return registry


def _add_modules(registry: Registry, trainable: Trainable, job: Job) -> None:
    """The stages' parameters, each pinned to the pipeline ranks that hold it."""
    tied_ends = job.config.model.tied and job.config.parallel.pp > 1
    for module in trainable.modules:
        names = [name for name, _ in module.named_parameters()]
        at_of = {name: [Pin("pp", trainable.pp_coordinates(name))] for name in names}
        same_as = {TIED_NAME: TIED_TO} if tied_ends and TIED_NAME in names else {}
        registry.add_module("model/", module, at_of=at_of, same_as=same_as)


def _add_position(registry: Registry, position: Position) -> None:
    def set_step(value: Any) -> None:  # noqa: ANN401 - checked by `_refuse_count`
        position.step = value

    def set_cursor(value: Any) -> None:  # noqa: ANN401
        position.cursor = value

    def set_skipped(value: Any) -> None:  # noqa: ANN401
        position.skipped = value

    registry.add_value("step", lambda: position.step, set_step, _refuse_count)
    registry.add_value("cursor", lambda: position.cursor, set_cursor, _refuse_count)
    registry.add_value("skipped", lambda: position.skipped, set_skipped, _refuse_ranges)


def _add_description(registry: Registry, job: Job) -> None:
    """What a checkpoint says of itself; a load leaves this run's own as it is."""
    config = job.config
    stages = stage_layers(config.model.layers, config.parallel.stages)
    described: dict[str, Any] = {
        "config": job.tree(),
        "pipeline": {
            "stages": [list(layers) for layers in stages],
            "virtual": config.parallel.virtual,
        },
        "layout": dict(layout_values(job.layout)),
        "tokenizer": job.tokenizer_tree(),
    }
    for name, value in described.items():
        registry.add_value(name, lambda value=value: value, lambda saved: None)  # type: ignore[misc]


def _refuse_count(value: Any) -> str | None:  # noqa: ANN401 - from a file: may be anything
    if type(value) is int and value >= 0:
        return None
    return f"expected a count, found {value!r}"


def _refuse_ranges(value: Any) -> str | None:  # noqa: ANN401 - from a file: may be anything
    is_list = isinstance(value, list) and all(
        isinstance(one, list)
        and len(one) == 2
        and all(type(number) is int for number in one)
        and 0 <= one[0] < one[1]
        for one in value
    )
    return None if is_list else f"expected ranges [first, end), found {value!r}"

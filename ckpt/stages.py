"""Which pipeline stage has which layers, and which pp coordinates hold which parameter.

The one rule for all: the trainer lays its stages out by it, and a reshard pins tensors by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from keepstep.ckpt.llama import EMBEDDINGS, OUTPUT, layer_of


def split_layers(layers: int, stages: int) -> list[list[int]]:
    """Consecutive layers for each stage, as even as can be, the larger shares first."""
    share, extra = divmod(layers, stages)
    starts = [stage * share + min(stage, extra) for stage in range(stages + 1)]
    return [list(range(start, end)) for start, end in pairwise(starts)]


def parameter_stages(
    fqn: str, stages: Sequence[Sequence[int]], pp: int, tied: bool
) -> tuple[int, ...] | None:
    """The pp coordinates that hold a parameter, or None where its name does not tell."""
    layer = layer_of(fqn)
    if layer is not None:
        numbers = (number % pp for number, layers in enumerate(stages) if layer in layers)
        held = next(numbers, None)
        return None if held is None else (held,)
    if fqn == EMBEDDINGS:
        return (0, pp - 1) if tied and pp > 1 else (0,)
    return (pp - 1,) if fqn in ("norm.weight", OUTPUT) else None

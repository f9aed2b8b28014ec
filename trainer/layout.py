"""Which rank holds what, by the rules of `ckpt`; needs no torch and no process group.

AXES is that of `ckpt.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.ckpt import placement
from keepstep.ckpt.layout import Layout, mesh_of
from keepstep.ckpt.llama import EMBEDDINGS, OUTPUT
from keepstep.ckpt.placement import Mesh
from keepstep.ckpt.stages import parameter_stages, split_layers
from keepstep.trainer.model_config import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis, and its data-parallel index over both dp axes."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    dp: int


def mesh(parallel: ParallelConfig) -> Mesh:
    """The grid of ranks: AXES with their sizes, outermost first."""
    layout = Layout(parallel.dp, parallel.tp, parallel.pp, parallel.dp_replicate)
    return mesh_of(layout)


def axis_sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    """Sizes of AXES, outermost first."""
    return tuple(axis.size for axis in mesh(parallel).axes)


def coordinates(parallel: ParallelConfig, rank: int) -> Coordinates:
    """The place of `rank`, which counts row-major over AXES."""
    pp, replicate, shard, tp = placement.coordinates(mesh(parallel), rank)
    return Coordinates(pp, replicate, shard, tp, dp=replicate * parallel.dp_shard + shard)


def stage_layers(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage: contiguous, each once; if uneven the first stages get one more."""
    return tuple(map(tuple, split_layers(layers, stages)))


def stages_of(parallel: ParallelConfig, pp_rank: int) -> tuple[int, ...]:
    """The stages that a pipeline rank runs: round robin (Interleaved1F1B's rule)."""
    return tuple(range(pp_rank, parallel.stages, parallel.pp))


def pp_coordinates(name: str, layers: int, parallel: ParallelConfig, tied: bool) -> tuple[int, ...]:
    """The pipeline ranks that hold the parameter `name`, ascending (two for a tied pair)."""
    if tied and name == OUTPUT:
        name = EMBEDDINGS
    stages = split_layers(layers, parallel.stages)
    held = parameter_stages(name, stages, parallel.pp, tied)
    if held is None:
        raise ValueError(f"{name!r} is no parameter of a Llama of {layers} layers")
    return held

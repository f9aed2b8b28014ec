"""Which rank holds what: plain arithmetic that needs no torch and no process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from keepstep.trainer.model_config import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis, and its data-parallel index over both dp axes."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    dp: int


def axis_sizes(parallel: ParallelConfig) -> tuple[int, int, int, int]:
    """Sizes of AXES, outermost first."""
    return (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.tp)


def coordinates(parallel: ParallelConfig, rank: int) -> Coordinates:
    """The place of `rank`, which counts row-major over AXES."""
    rest, tp = divmod(rank, parallel.tp)
    pp, dp = divmod(rest, parallel.dp)
    replicate, shard = divmod(dp, parallel.dp_shard)
    return Coordinates(pp, replicate, shard, tp, dp)


def stage_layers(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage: contiguous, each once; if uneven the first stages get one more."""
    short, longer = divmod(layers, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + short + (stage < longer))
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


def stages_of(parallel: ParallelConfig, pp_rank: int) -> tuple[int, ...]:
    """The stages that a pipeline rank runs: round robin (Interleaved1F1B's rule)."""
    return tuple(range(pp_rank, parallel.stages, parallel.pp))


def pp_coordinates(name: str, layers: int, parallel: ParallelConfig, tied: bool) -> tuple[int, ...]:
    """The pipeline ranks that hold the parameter `name`, ascending (two for a tied pair)."""
    last = (parallel.stages - 1) % parallel.pp
    if name in ("tok_embeddings.weight", "output.weight") and tied:
        return tuple(sorted({0, last}))
    if name == "tok_embeddings.weight":
        return (0,)
    if not name.startswith("layers."):
        return (last,)
    layer = int(name.split(".")[1])
    stages = stage_layers(layers, parallel.stages)
    return (next(s for s, held in enumerate(stages) if layer in held) % parallel.pp,)

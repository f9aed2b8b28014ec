"""How many bytes of state hosts must fetch from elsewhere when the layout changes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from keepstep.planner.cost import stage_layers
from keepstep.planner.layout import Layout
from keepstep.planner.memory import OPTIMIZER_STATE_BYTES
from keepstep.planner.model import ModelConfig

Floats = NDArray[np.float64]


def moved_bytes(
    model: ModelConfig,
    old: Layout,
    new: Layout,
    came_from: tuple[int | None, ...],
    ranks_per_host: int,
    peers: int = 1,
) -> float:
    """Bytes that the hosts lack, all together, to restore `new` from the images of `old`.

    came_from[h] is the place of host h in the old order, None if it is new. A host holds its own
    images and those of the `peers` hosts before it. Ranks fill hosts in order, in both layouts.
    Every tensor counts as cut along one dim: the tp chunk, then the dp chunk inside it.
    """
    ranks = np.arange(new.gpus)
    need_stage, need_low, need_high = _parts(new, ranks, owned=False)
    places = [-1 if place is None else place for place in came_from]
    places += [-1] * (-(-new.gpus // ranks_per_host) - len(places))
    place = np.array(places)[ranks // ranks_per_host]
    share = _shared_layers(model.layers, old.pp, old.virtual, new.pp, new.virtual)
    layers = np.array(stage_layers(model.layers, new.pp, new.virtual)) / model.layers
    need = layers[need_stage] * (need_high - need_low)
    hosts = -(-old.gpus // ranks_per_host)
    found = np.zeros(new.gpus)
    for back in range(min(peers + 1, hosts)):
        first = (place - back) % hosts * ranks_per_host
        for slot in range(ranks_per_host):
            stage, low, high = _parts(old, np.minimum(first + slot, old.gpus - 1), owned=True)
            common = np.minimum(high, need_high) - np.maximum(low, need_low)
            there = (place >= 0) & (first + slot < old.gpus)
            found += np.where(there, share[stage, need_stage] * np.maximum(0.0, common), 0.0)
    missing = np.maximum(0.0, need - found)
    return float(missing.sum() * model.params * OPTIMIZER_STATE_BYTES)


def _parts(
    layout: Layout, ranks: NDArray[np.int64], owned: bool
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Each rank's stage, and the interval of the cut dim (0 to 1) that it owns, or needs.

    What replicas hold in common each owns a part of; each needs all of it.
    """
    rest, tp = np.divmod(ranks, layout.tp)
    stage, dp = np.divmod(rest, layout.dp)
    replica, shard = np.divmod(dp, layout.dp_shard)
    if owned:
        width, piece = layout.dp, shard * layout.dp_replicate + replica
    elif layout.zero:
        width, piece = layout.dp_shard, shard
    else:
        width, piece = 1, np.zeros_like(shard)
    low = (tp * width + piece) / (layout.tp * width)
    return stage, low, low + 1.0 / (layout.tp * width)


@lru_cache(maxsize=256)
def _shared_layers(layers: int, pp: int, virtual: int, other: int, other_virtual: int) -> Floats:
    """[a, b]: share of all layers that rank a of the one pipeline and b of the other both have."""
    first = _membership(layers, pp, virtual)
    second = _membership(layers, other, other_virtual)
    both: Floats = first @ second.T / layers
    return both


def _membership(layers: int, pp: int, virtual: int) -> Floats:
    base, extra = divmod(layers, pp * virtual)
    chunk_of = np.repeat(
        np.arange(pp * virtual), [base + (chunk < extra) for chunk in range(pp * virtual)]
    )
    held: Floats = np.where(chunk_of % pp == np.arange(pp)[:, None], 1.0, 0.0)
    return held

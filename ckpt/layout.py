"""Layouts as people write them ("dp=2,tp=2,pp=2"), the mesh they make, and what cannot work.

The mesh of every layout has the four axes pp, dp_replicate, dp_shard, tp, also those of size 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.llama import LlamaShape
from keepstep.ckpt.placement import Mesh, MeshAxis

PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
AXES = (PIPELINE, REPLICATE, SHARD, TENSOR)
_SIZE_MAX = 1 << 20


class BadLayout(CheckpointError, ValueError):
    """A layout that cannot be, or in which this model cannot be trained; names the numbers."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the parallel axes; `dp_replicate` of the `dp` copies hold whole replicas (HSDP)."""

    dp: int
    tp: int
    pp: int
    dp_replicate: int = 1

    def __str__(self) -> str:
        replicate = f",dp_replicate={self.dp_replicate}" if self.dp_replicate != 1 else ""
        return f"dp={self.dp},tp={self.tp},pp={self.pp}{replicate}"


def parse_layout(text: str) -> Layout:
    """The layout that `text` names; an axis that it leaves out has size 1.

    Raises:
        BadLayout: an unknown or repeated axis, no whole number, or dp % dp_replicate != 0.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if axis not in Layout.__struct_fields__ or not equals:
            raise BadLayout(
                f"layout {text!r}: {part.strip()!r} is not AXIS=SIZE with an axis of "
                f"{', '.join(Layout.__struct_fields__)}"
            )
        if axis in sizes:
            raise BadLayout(f"layout {text!r} names {axis} twice")
        if not (re.fullmatch(r"[0-9]{1,7}", size) and 1 <= int(size) <= _SIZE_MAX):
            raise BadLayout(f"layout {text!r}: {axis} should be a number from 1 to {_SIZE_MAX}")
        sizes[axis] = int(size)
    layout = Layout(**({"dp": 1, "tp": 1, "pp": 1} | sizes))
    if layout.dp % layout.dp_replicate:
        raise BadLayout(
            f"layout {text!r}: dp {layout.dp} is no multiple of dp_replicate {layout.dp_replicate}"
        )
    return layout


def mesh_of(layout: Layout) -> Mesh:
    """The grid of ranks of a layout, pp outermost and tp innermost."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp // layout.dp_replicate, layout.tp)
    return Mesh(tuple(MeshAxis(name, size) for name, size in zip(AXES, sizes, strict=True)))


def layout_of(mesh: Mesh) -> Layout | None:
    """The layout that makes this mesh; None for a mesh with other axes."""
    if tuple(axis.name for axis in mesh.axes) != AXES:
        return None
    pp, replicate, shard, tp = (axis.size for axis in mesh.axes)
    return Layout(dp=replicate * shard, tp=tp, pp=pp, dp_replicate=replicate)


def check_fits(layout: Layout, llama: LlamaShape) -> None:
    """Raise unless a model of these dimensions can be trained in `layout`.

    Raises:
        BadLayout: names the two numbers that do not go together.
    """
    for what, number in (
        ("heads", llama.heads),
        ("kv_heads", llama.kv_heads),
        ("ffn_dim", llama.ffn_dim),
        ("vocab_size", llama.vocab_size),
        ("seq_len", llama.seq_len),
    ):
        if number % layout.tp:
            raise BadLayout(f"{what} {number} is no multiple of tp {layout.tp}")
    if llama.layers < layout.pp:
        raise BadLayout(f"{llama.layers} layers are fewer than the {layout.pp} stages of pp")


def check_batch(layout: Layout, values: Mapping[str, Any]) -> None:
    """Raise BadLayout unless the samples of a step can be shared out among the dp replicas."""
    config = values.get("config")
    batch = config.get("batch") if isinstance(config, dict) else None
    size = batch.get("global_batch") if isinstance(batch, dict) else None
    if isinstance(size, int) and size % layout.dp:
        raise BadLayout(f"global_batch {size} is no multiple of dp {layout.dp}")


def layout_values(layout: Layout) -> Mapping[str, Any]:
    """The layout as it stands in a manifest's values."""
    return {
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
    }

"""How a state's tensors lie in another layout: placements, pins and values, from the old ones.

The rule: a split keeps its dim and its axis, and cuts by the axis's new size. Where an axis of the
trainer grows from size 1, its parameters are cut over it as the trainer cuts them. Pins to pipeline
stages are made anew from parameter names: ``layers.<i>.`` lies on the stage that holds layer i, the
embeddings on the first, the final norm and the output matrix on the last, tied embeddings on both.
A tensor with another name that was pinned is no longer pinned where its axis changes: every
coordinate then counts as a holder, which is always right. What belongs to one rank
(``rank/``) cannot live on in another mesh and is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import manifest_key
from keepstep.ckpt.layout import PIPELINE, SHARD, TENSOR, Layout, layout_of, layout_values
from keepstep.ckpt.llama import MODEL_PREFIX, OUTPUT, tensor_parallel_dim
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.placement import Mesh, Pin, Placement, Split
from keepstep.ckpt.restore import is_common
from keepstep.ckpt.stages import parameter_stages, split_layers
from keepstep.ckpt.structure import HeldTensor, Structure, structure_of


@dataclass(frozen=True, slots=True)
class Relayout:
    """A state in another layout, before a byte is written.

    `dropped`: the tensors and values that belong to one rank of the old mesh.
    """

    structure: Structure
    values: dict[str, Any]
    dropped: tuple[str, ...]


def relayout(manifest: Manifest, mesh: Mesh) -> Relayout:
    """The structure that `manifest`'s state has over `mesh`. Tensors keep name, shape, dtype."""
    same = mesh == manifest.mesh
    layout = layout_of(mesh)
    file = manifest_key(manifest.state)
    values = dict(manifest.values)
    pipeline = None
    if not same and layout is not None:
        values = relaid_values(values, layout, file)
        pipeline = pipeline_in(values, file)
    rule = _Rule(manifest, mesh, pipeline)
    names = (*manifest.tensors, *manifest.values)
    gone = frozenset(() if same else (name for name in names if not is_common(name)))
    held = {
        name: HeldTensor(
            spec.shape,
            spec.dtype,
            rule.placement(name, len(spec.shape), manifest.placements[spec.placement]),
        )
        for name, spec in manifest.tensors.items()
        if name not in gone
    }
    aliases = {alias: name for alias, name in manifest.aliases.items() if name not in gone}
    values = {name: value for name, value in values.items() if name not in gone}
    return Relayout(structure_of(mesh, held, aliases), values, tuple(sorted(gone)))


class _Rule:
    """The placement rule for one pair of old manifest and new mesh."""

    def __init__(self, manifest: Manifest, mesh: Mesh, pipeline: Pipeline | None) -> None:
        self._sizes = {axis.name: axis.size for axis in mesh.axes}
        self._before = {axis.name: axis.size for axis in manifest.mesh.axes}
        self._tied = MODEL_PREFIX + OUTPUT in manifest.aliases
        self._pipeline = pipeline

    def placement(self, name: str, dims: int, old: Placement) -> Placement:
        """The new placement of one tensor with so many dims."""
        splits = [split for split in old.splits if split.axis in self._sizes]
        pins = {
            pin.axis: pin for pin in old.at if self._sizes.get(pin.axis) == self._before[pin.axis]
        }
        if self._pipeline is not None:
            fqn = parameter_of(name)
            if dims and _grows(self._before, self._sizes, SHARD, splits):
                splits.append(Split(SHARD, 0))
            cut = tensor_parallel_dim(fqn)
            if dims and cut is not None and _grows(self._before, self._sizes, TENSOR, splits):
                splits.insert(0, Split(TENSOR, cut))
            splits.sort(key=lambda split: split.dim)
            pp = self._sizes[PIPELINE]
            held = parameter_stages(fqn, self._pipeline.stages, pp, self._tied)
            if held is not None:
                pins[PIPELINE] = Pin(PIPELINE, held)
        return Placement(tuple(splits), tuple(pins[axis] for axis in sorted(pins)))


def _grows(
    before: Mapping[str, int], after: Mapping[str, int], axis: str, splits: list[Split]
) -> bool:
    """Whether the axis is one that did not cut before only because it had size 1."""
    new = before.get(axis, 1) == 1 and after[axis] > 1
    return new and all(split.axis != axis for split in splits)


def parameter_of(name: str) -> str:
    """The parameter that a tensor of the model or the optimizer belongs to; "" for others."""
    parts = name.split("/")
    return parts[1] if len(parts) > 1 and parts[0] in ("model", "optimizer") else ""


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which layers each stage has; stage s is on pp coordinate s % pp, `virtual` on each."""

    stages: list[list[int]]
    virtual: int

    def over(self, pp: int) -> Pipeline:
        """The same layers over `pp` ranks, with as many stages a rank where there are enough."""
        layers = sum(map(len, self.stages))
        virtual = max(1, min(self.virtual, layers // pp)) if pp > 1 else 1
        return Pipeline(split_layers(layers, pp * virtual), virtual)


def pipeline_in(values: Mapping[str, Any], file: str) -> Pipeline | None:
    """The pipeline as a manifest's values tell it; None if they have none.

    Raises:
        FormatError: it has another form.
    """
    if "pipeline" not in values:
        return None
    try:
        return msgspec.convert(values["pipeline"], Pipeline)
    except msgspec.ValidationError as error:
        raise FormatError(file, "values.pipeline", "stages and virtual", str(error)) from error


def relaid_values(values: Mapping[str, Any], layout: Layout, file: str) -> dict[str, Any]:
    """The manifest's values with what they say of the layout changed; the rest as it was."""
    changed = dict(values)
    sizes = layout_values(layout)
    if "layout" in changed:
        changed["layout"] = dict(sizes)
    old = pipeline_in(values, file)
    pipeline = None if old is None else old.over(layout.pp)
    if pipeline is not None:
        changed["pipeline"] = msgspec.to_builtins(pipeline)
    config = changed.get("config")
    if isinstance(config, dict) and isinstance(config.get("parallel"), dict):
        parallel = config["parallel"] | sizes
        if pipeline is not None and "virtual" in parallel:
            parallel["virtual"] = pipeline.virtual
        changed["config"] = config | {"parallel": parallel}
    return changed

"""What a store holds, as plain data: for `ls` and `show`, and for whoever asks from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from math import prod, sqrt

import numpy as np

from keepstep.ckpt.arrays import numbers
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.keys import parse_key
from keepstep.ckpt.layout import layout_of
from keepstep.ckpt.lineage import Committed, Lineage, Status
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.placement import Mesh, Placement
from keepstep.ckpt.reader import CheckpointReader
from keepstep.storage.store import Store

_LOOKED_AT_MAX = 1_000
_PIECE_BYTES = 4 << 20

UNMEASURED = frozenset({"F4_X2"})
"""Element types whose bytes are no numbers one by one: no norms."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint whose files are in the store."""

    commit: Committed
    mesh: Mesh | None
    """The mesh with which its generation began."""
    verdict: str
    """What health said of it: "good", "bad", or "" if nothing."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Of all elements of a tensor.

    Attributes:
        l2: square root of the sum of squares, over the finite elements.
        abs_max: the largest absolute value of a finite element; 0 if there is none.
        not_finite: number of elements that are NaN or infinite.
    """

    l2: float
    abs_max: float
    not_finite: int


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    size_bytes: int
    aliases: tuple[str, ...]
    norms: Norms | None


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors whose names begin alike, up to the first slash."""

    name: str
    tensors: int
    elements: int
    size_bytes: int


def checkpoint_rows(lineage: Lineage) -> list[CheckpointRow]:
    """The checkpoints that are not retired, newest first."""
    meshes = {each.number: each.mesh for each in lineage.generations}
    return [
        CheckpointRow(commit, meshes.get(commit.state.generation), _verdict(commit, lineage))
        for commit in lineage.commits
        if commit.status is not Status.RETIRED
    ]


def _verdict(commit: Committed, lineage: Lineage) -> str:
    if commit.status is Status.BAD:
        return "bad"
    return "good" if commit.state in lineage.good else ""


def groups(manifest: Manifest) -> list[Group]:
    """The tensors by the first part of their names, by name."""
    found: dict[str, list[int]] = {}
    for name, spec in manifest.tensors.items():
        elements = prod(spec.shape)
        tally = found.setdefault(name.split("/", 1)[0], [0, 0, 0])
        for place, amount in enumerate((1, elements, elements * DTYPES[spec.dtype].itemsize)):
            tally[place] += amount
    return [Group(name, *found[name]) for name in sorted(found)]


def tensor_rows(
    reader: CheckpointReader, patterns: Sequence[str] = (), *, with_norms: bool = False
) -> Iterator[TensorRow]:
    """The tensors of which the name, or another name, matches a glob; all if there is none.

    By name. Norms are computed as the rows are asked for, from bytes whose checksums were compared.

    Raises:
        Corrupt: with norms, a checksum does not match.
        FormatError, StoreError: with norms, an image cannot be read.
    """
    manifest = reader.manifest
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    for name in sorted(manifest.tensors):
        names = [name, *sorted(aliases.get(name, ()))]
        if patterns and not any(fnmatchcase(n, p) for n in names for p in patterns):
            continue
        spec = manifest.tensors[name]
        measured = with_norms and spec.dtype not in UNMEASURED
        yield TensorRow(
            name=name,
            shape=spec.shape,
            dtype=spec.dtype,
            placement=manifest.placements[spec.placement],
            size_bytes=prod(spec.shape) * DTYPES[spec.dtype].itemsize,
            aliases=tuple(names[1:]),
            norms=norms(reader, name) if measured else None,
        )


def norms(reader: CheckpointReader, name: str) -> Norms:
    """The norms of one tensor, in float64, whatever its layout: read piece by piece.

    Raises: as `CheckpointReader.read`.
    """
    dtype = reader.spec(name).dtype
    squares, abs_max, not_finite = 0.0, 0.0, 0
    with np.errstate(all="ignore"):  # a sum beyond float64 is shown as infinite
        for _, piece in reader.pieces(name, _PIECE_BYTES):
            values = np.abs(numbers(piece, dtype)).reshape(-1)
            finite = values[np.isfinite(values)]
            not_finite += values.size - finite.size
            if finite.size:
                squares += float(np.dot(finite, finite))
                abs_max = max(abs_max, float(finite.max()))
    return Norms(sqrt(squares), abs_max, not_finite)


def layout_text(mesh: Mesh | None) -> str:
    """A mesh as people write a layout: "dp=2,tp=2,pp=2"; other axes by their names, if above 1."""
    if mesh is None:
        return "unknown"
    layout = layout_of(mesh)
    if layout is not None:
        return str(layout)
    axes = [axis for axis in mesh.axes if axis.size > 1] or mesh.axes
    return ",".join(f"{axis.name}={axis.size}" for axis in axes)


def placement_text(placement: Placement) -> str:
    """A placement for people: "tp:0 dp_shard:0" (axis:dim), "at pp=0,3", or "replicated"."""
    parts = [f"{split.axis}:{split.dim}" for split in placement.splits]
    parts += [f"at {pin.axis}={','.join(map(str, pin.coords))}" for pin in placement.at]
    return " ".join(parts) if parts else "replicated"


def history(lineage: Lineage) -> list[Generation]:
    """The generations, newest first."""
    return list(reversed(lineage.generations))


def what_else_is_there(store: Store) -> str | None:
    """What a store without a log holds, as the end of a sentence; None if it holds nothing.

    Looks at no more than 1,000 names.
    """
    names = [info.key for info in islice(store.list(""), _LOOKED_AT_MAX)]
    if not names:
        return None
    within = [name for name in names if name.startswith("store/log/")]
    if within:
        return "a run directory: its store is the directory 'store' in it"
    if any(parse_key(name) is not None for name in names):
        return "images or manifests of this format, but no log: without it nothing is a checkpoint"
    kinds = {
        "a Hugging Face model (see `keepstep import`)": ("config.json", ".safetensors"),
        "pickled files": (".pt", ".pth", ".bin", ".ckpt", ".pkl"),
    }
    for kind, ends in kinds.items():
        if any(name.endswith(ends) for name in names):
            return f"what looks like {kind}"
    shown = ", ".join(names[:3])
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return f"files that are not of this format: {shown}{more}"

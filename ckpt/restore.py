"""What to read for a restore: pure arithmetic from needed boxes to chunks of images.

Three steps: `compare` what is wanted with what a checkpoint has; `find_sources`, which image has
which part of what is needed; and `plan_reads`: whole chunks (they are what checksums cover), each
once, neighbours in one range. Where a tensor lies in an image follows from the plan, so no file is
read for any of it.

A needed part of a stored tensor is a strided view of the image's data, wherever that lies: in a
pool, in a mapped file, or in staging memory with the image's own layout. Chunks that nobody needs
are not read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.errors import NotRestorable, StructureMismatch
from keepstep.ckpt.image import ImageHeader, ImageItem
from keepstep.ckpt.manifest import Manifest, TensorSpec
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box, Region, intersect, relative_to, runs, strides
from keepstep.ckpt.structure import Structure

RANK_PREFIX = "rank/"
"""Names under it belong to one rank of one mesh, and are never restored into another mesh."""

_RUNS_MAX = 65_536  # above it, reading everything in between is cheaper than looking


@dataclass(frozen=True, slots=True)
class Options:
    """What a load may do beyond giving back exactly what was saved.

    Attributes:
        prefixes: load only tensors and values whose names begin with one of these; None: all.
        allow_missing: leave alone what the checkpoint lacks.
        allow_unexpected: drop what only the checkpoint has.
        allow_dtype_change: convert where the dtype differs.
    """

    prefixes: tuple[str, ...] | None = None
    allow_missing: bool = False
    allow_unexpected: bool = False
    allow_dtype_change: bool = False

    def wants(self, name: str) -> bool:
        """Whether the name is to be loaded at all."""
        return self.prefixes is None or name.startswith(self.prefixes)


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a needed tensor and the image that has it.

    Attributes:
        name: what it is called here; `stored` what in the checkpoint (tied weights).
        owned: the box that the image has.
        box: the part of it that is needed.
    """

    name: str
    stored: str
    owned: Box
    box: Box


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Chunks [first, last) of one image's data: ascending, apart from each other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a needed tensor as it lies in an image: a strided view of its data.

    Attributes:
        name: the tensor as it is called here.
        dtype: as stored.
        box: which part, in global coordinates.
        image: rank whose image has it.
        offset: byte of its first element, counted from the start of the image's data.
        strides: in elements.
    """

    name: str
    dtype: str
    box: Box
    image: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What of which image is needed (image by rank -> chunks), and the pieces that are in it."""

    chunks: dict[int, Ranges]
    pieces: tuple[Piece, ...]


def compare(structure: Structure, manifest: Manifest, options: Options) -> dict[str, str]:
    """Which stored tensor each tensor of `structure` gets: name -> name in the manifest.

    Tied weights may go by any of their names, here and there. What belongs to one rank is left
    out unless `has_ranks`.

    Raises:
        StructureMismatch: with the complete lists, for what `options` does not allow. Another
            shape is never allowed.
    """
    with_ranks = has_ranks(structure, manifest)
    chosen: dict[str, str] = {}
    missing, changed = [], []
    for name, spec in structure.tensors.items():
        if not options.wants(name) or not (with_ranks or is_common(name)):
            continue
        stored = _stored_name(name, structure.aliases, manifest)
        if stored is None:
            missing.append(name)
            continue
        found = manifest.tensors[stored]
        if found.shape != spec.shape:
            changed.append(f"{name} has shape {spec.shape} here, {found.shape} there")
        elif found.dtype != spec.dtype and not options.allow_dtype_change:
            changed.append(f"{name} is {spec.dtype} here, {found.dtype} there")
        else:
            chosen[name] = stored
    # A tensor that is tied here and not there has a second value that would be lost: unexpected.
    known = {*chosen.values(), *structure.tensors}
    unexpected = [
        name
        for name in manifest.tensors
        if name not in known and options.wants(name) and (with_ranks or is_common(name))
    ]
    refused = StructureMismatch(
        f"the checkpoint of generation {manifest.state.generation}, step {manifest.state.step} "
        f"does not fit; nothing was loaded",
        missing=() if options.allow_missing else sorted(missing),
        unexpected=() if options.allow_unexpected else sorted(unexpected),
        changed=sorted(changed),
    )
    if refused.missing or refused.unexpected or refused.changed:
        raise refused
    return chosen


def has_ranks(structure: Structure, manifest: Manifest) -> bool:
    """Whether what belongs to single ranks is to be restored.

    Not into another mesh; nor from a checkpoint that has nothing of the kind, as a reshard makes.
    """
    names = (*manifest.tensors, *manifest.values)
    return structure.mesh == manifest.mesh and not all(map(is_common, names))


def is_common(name: str) -> bool:
    """Whether a tensor or value belongs to the run, and not to one rank."""
    return not name.startswith(RANK_PREFIX)


def find_sources(
    plan: Plan, needs: Mapping[str, Box], chosen: Mapping[str, str]
) -> dict[int, list[Source]]:
    """Image by rank -> the parts of `needs` (name -> box of it, not empty) that it has.

    Raises:
        NotRestorable: if the images do not cover a box exactly once.
    """
    found: dict[int, list[Source]] = {}
    for name, need in needs.items():
        stored = chosen[name]
        covered = 0
        for rank, owned in plan.owners(Region(stored, need)):
            box = intersect(owned, need)
            if box is not None:
                covered += box.volume
                found.setdefault(rank, []).append(Source(name, stored, owned, box))
        if covered != need.volume:
            raise NotRestorable(
                f"{covered} of the {need.volume} elements of {name!r} in {need} are in the images"
            )
    return found


def plan_reads(
    sources: Mapping[int, Sequence[Source]],
    headers: Mapping[int, ImageHeader],
    tensors: Mapping[str, TensorSpec],
) -> ReadPlan:
    """The chunks that hold all sources, given their images' headers and the manifest's tensors.

    The headers need not be sealed: only where a tensor lies counts.

    Raises:
        FormatError: if an image does not have what the plan says it has.
    """
    chunks: dict[int, Ranges] = {}
    pieces: list[Piece] = []
    for rank in sorted(sources):
        header = headers[rank]
        needed: list[tuple[int, int]] = []
        for source in sources[rank]:
            item = header.item(source.stored, tensors[source.stored], source.owned)
            low, high = _span(source, item)
            needed += _needed_chunks(source, item, (low, high))
            steps = strides(source.owned.sizes)
            pieces.append(Piece(source.name, item.dtype.name, source.box, rank, low, steps))
        chunks[rank] = merged(needed)
    return ReadPlan(chunks, tuple(pieces))


def _stored_name(name: str, aliases: Mapping[str, str], manifest: Manifest) -> str | None:
    if name in manifest.tensors:
        return name
    if name in manifest.aliases:
        return manifest.aliases[name]
    others = (alias for alias, target in aliases.items() if target == name)
    return next((other for other in others if other in manifest.tensors), None)


def _span(source: Source, item: ImageItem) -> tuple[int, int]:
    """First and one-after-last byte of the needed part, counted from the start of the data."""
    part = relative_to(source.box, source.owned)
    low = high = 0
    for offset, size, stride in zip(
        part.offsets, part.sizes, strides(source.owned.sizes), strict=True
    ):
        low += offset * stride
        high += (offset + size - 1) * stride
    itemsize = item.dtype.itemsize
    return item.offset + low * itemsize, item.offset + (high + 1) * itemsize


def _needed_chunks(source: Source, item: ImageItem, span: tuple[int, int]) -> list[tuple[int, int]]:
    """The chunks [first, last) that hold the needed part: without gaps of a chunk and more."""
    length = source.box.volume * item.dtype.itemsize
    if span[1] - span[0] < length + 2 * CHUNK_BYTES:
        return [_chunks(*span)]
    parts = list(islice(runs(source.box, source.owned, item.dtype.itemsize), _RUNS_MAX + 1))
    if len(parts) > _RUNS_MAX:
        return [_chunks(*span)]
    return [_chunks(item.offset + offset, item.offset + offset + size) for offset, _, size in parts]


def _chunks(low: int, high: int) -> tuple[int, int]:
    return low // CHUNK_BYTES, -(-high // CHUNK_BYTES)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ranges [first, last), sorted; neighbours that touch are joined."""
    union: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if union and first <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, last))
    return tuple(union)

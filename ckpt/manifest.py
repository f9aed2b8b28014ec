"""The manifest: what a checkpoint consists of. Grows with tensors + ranks (D4).

It does not grow with tensors x ranks: which box of which tensor lies in which image is not listed;
`plan` computes it from shapes, placements and mesh, and each image header repeats it for its own
tensors.
"""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.ckpt.placement import Mesh, Placement

FORMAT_VERSION = 1


class State(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A state of the run: after `step` as `generation` computed it."""

    generation: int
    step: int


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A global tensor: shape, dtype (a name of `dtypes`), index into `Manifest.placements`."""

    shape: tuple[int, ...]
    dtype: str
    placement: int


class ImageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's image as stored: size of the file, of its header, and the header's digest.

    The header holds the checksums of all data chunks, so this digest covers the whole file.
    """

    rank: int
    size_bytes: int
    header_bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a reader needs to find any region of a state."""

    format: int
    job: str
    state: State
    mesh: Mesh
    placements: tuple[Placement, ...]
    tensors: dict[str, TensorSpec]
    aliases: dict[str, str]
    """Other names of a tensor (tied weights): alias -> name in `tensors`."""
    values: dict[str, Any]
    """JSON values that are equal on all ranks: cursor, schedule, configuration."""
    plan_digest: str
    images: tuple[ImageRecord, ...]
    """One per rank that owns at least one byte, ascending by rank."""

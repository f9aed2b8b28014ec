"""The manifest: what a checkpoint consists of. Grows with tensors + ranks (D4).

It does not grow with tensors x ranks: which box of which tensor lies in which image is not listed;
`plan` computes it from shapes, placements and mesh, and each image header repeats it for its own
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import msgspec

from keepstep.ckpt.checksum import DIGEST_DIGITS
from keepstep.ckpt.document import check_json, decode, encode, shortened
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.encoding import EncodedImage, check_encoded
from keepstep.ckpt.errors import CheckpointError, FormatError
from keepstep.ckpt.names import job_fault, name_fault
from keepstep.ckpt.placement import DIMS_MAX, Mesh, Placement, mesh_size
from keepstep.ckpt.plan import check_structure, plan_digest
from keepstep.storage.store import Buffer

FORMAT_VERSION = 1

MANIFEST_BYTES_MAX = 1 << 26
"""Room for 5 x 10^5 tensors."""

GENERATION_MAX = 10**6 - 1
STEP_MAX = 10**12 - 1
EXTENT_MAX = 2**48
"""The longest dim, and the most bytes of data in one image: far beyond any, far below overflow."""

ALIGNMENT_BYTES = 4_096
"""Data begins at a multiple of this in an image, for O_DIRECT."""

HEADER_BYTES_MAX = 100_000_000
"""The longest JSON header that safetensors reads, and so we too."""

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")


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


class DoneRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a done record says: the image's record, and how it is encoded, if it is."""

    rank: int
    size_bytes: int
    header_bytes: int
    digest: str
    encoded: EncodedImage | None = None

    @property
    def image(self) -> ImageRecord:
        """The record of the plain image."""
        return ImageRecord(self.rank, self.size_bytes, self.header_bytes, self.digest)


def done_record(image: ImageRecord, encoded: EncodedImage | None = None) -> DoneRecord:
    """The done record of an image."""
    return DoneRecord(image.rank, image.size_bytes, image.header_bytes, image.digest, encoded)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    """One per rank that owns at least one byte, ascending by rank. Of the plain images."""
    encoded: tuple[EncodedImage, ...] = ()
    """Of images that lie encoded in the store, ascending by rank. Left out if there is none."""

    def stored_bytes(self) -> dict[int, int]:
        """Rank -> length of its image as it lies in the store."""
        plain = {image.rank: image.size_bytes for image in self.images}
        return plain | {image.rank: image.size_bytes for image in self.encoded}


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest without images: what a state is, before anybody knows where all of it lies.

    Each host has it with its own images; with the records of all images it becomes the manifest.
    """

    format: int
    job: str
    state: State
    mesh: Mesh
    placements: tuple[Placement, ...]
    tensors: dict[str, TensorSpec]
    aliases: dict[str, str]
    values: dict[str, Any]
    plan_digest: str

    def manifest(
        self, images: Iterable[ImageRecord], encoded: Iterable[EncodedImage] = ()
    ) -> Manifest:
        """The manifest with these images, of which some are encoded; both in any order."""
        return Manifest(
            format=self.format,
            job=self.job,
            state=self.state,
            mesh=self.mesh,
            placements=self.placements,
            tensors=self.tensors,
            aliases=self.aliases,
            values=self.values,
            plan_digest=self.plan_digest,
            images=tuple(sorted(images, key=lambda image: image.rank)),
            encoded=tuple(sorted(encoded, key=lambda image: image.rank)),
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as stored; equal manifests make equal bytes.

    Raises FormatError (file "manifest") for one that `decode_manifest` would refuse, and
    NotRepresentable for a value that JSON does not have.
    """
    check_json(manifest.values, "values")
    data = encode(manifest)
    check_manifest(manifest, "manifest")
    if len(data) > MANIFEST_BYTES_MAX:
        raise FormatError("manifest", "", f"at most {MANIFEST_BYTES_MAX} bytes", f"{len(data)}")
    return data


def decode_manifest(data: Buffer, file: str) -> Manifest:
    """The manifest in `data`, checked in itself (`check_manifest`).

    Raises FormatError (Foreign, NewerVersion) and nothing else.
    """
    manifest = decode(
        data, Manifest, bytes_max=MANIFEST_BYTES_MAX, file=file, version_known=FORMAT_VERSION
    )
    try:
        check_json(manifest.values, "values")
    except CheckpointError as error:
        raise FormatError(file, "values", "plain JSON", shortened(str(error))) from error
    check_manifest(manifest, file)
    return manifest


def encode_description(description: Description) -> bytes:
    """The description as stored. Raises as `encode_manifest`, with file "description"."""
    check_json(description.values, "values")
    data = encode(description)
    check_described(description, "description")
    if len(data) > MANIFEST_BYTES_MAX:
        raise FormatError("description", "", f"at most {MANIFEST_BYTES_MAX} bytes", f"{len(data)}")
    return data


def decode_description(data: Buffer, file: str) -> Description:
    """The description in `data`, checked in itself. Raises as `decode_manifest`."""
    found = decode(
        data, Description, bytes_max=MANIFEST_BYTES_MAX, file=file, version_known=FORMAT_VERSION
    )
    try:
        check_json(found.values, "values")
    except CheckpointError as error:
        raise FormatError(file, "values", "plain JSON", shortened(str(error))) from error
    check_described(found, file)
    return found


def check_state(state: State, file: str, field: str) -> None:
    """Raise FormatError unless generation and step have the digits that keys have for them."""
    for name, number, most in (
        ("generation", state.generation, GENERATION_MAX),
        ("step", state.step, STEP_MAX),
    ):
        if not 0 <= number <= most:
            raise FormatError(file, f"{field}.{name}", f"0 to {most}", f"{number}")


def check_digest(digest: str, file: str, field: str) -> None:
    """Raise FormatError unless `digest` is 32 lower-case hex digits."""
    if _DIGEST.fullmatch(digest) is None:
        expected = f"{DIGEST_DIGITS} lower-case hex digits"
        raise FormatError(file, field, expected, shortened(repr(digest)))


def check_manifest(manifest: Manifest, file: str) -> None:
    """Raise FormatError unless all parts of the manifest are possible and agree.

    Its plan digest is that of its structure, and its images have together as many bytes of data as
    its tensors.
    """
    tensor_bytes = check_described(manifest, file)
    data_bytes = _check_images(manifest, file)
    _check_encoded(manifest, file)
    if data_bytes != tensor_bytes:
        expected = f"{tensor_bytes} bytes of data in all, as the tensors have"
        raise FormatError(file, "images", expected, f"{data_bytes}")


def check_described(manifest: Manifest | Description, file: str) -> int:
    """Check all but the images, as `check_manifest`; return how many bytes all tensors have."""
    if manifest.format != FORMAT_VERSION:
        raise FormatError(file, "format", f"{FORMAT_VERSION}", f"{manifest.format}")
    fault = job_fault(manifest.job)
    if fault is not None:
        raise FormatError(
            file, "job", "a job's name", f"{shortened(manifest.job)!r}, which {fault}"
        )
    check_state(manifest.state, file, "state")
    try:
        check_structure(manifest.mesh, manifest.placements, manifest.tensors)
    except CheckpointError as error:
        raise FormatError(file, "tensors", "placements that fit", shortened(str(error))) from error
    tensor_bytes = _check_tensors(manifest, file)
    _check_aliases(manifest, file)
    check_digest(manifest.plan_digest, file, "plan_digest")
    digest = plan_digest(manifest.mesh, manifest.placements, manifest.tensors)
    if digest != manifest.plan_digest:
        raise FormatError(file, "plan_digest", f"{digest}, of its structure", manifest.plan_digest)
    return tensor_bytes


def _check_tensors(manifest: Manifest | Description, file: str) -> int:
    """Check names and shapes; return how many bytes all tensors have."""
    total = 0
    for name, spec in manifest.tensors.items():
        fault = name_fault(name)
        if fault is not None:
            raise FormatError(file, f"tensors[{shortened(name)!r}]", "a name", f"one that {fault}")
        if len(spec.shape) > DIMS_MAX or not all(0 <= size <= EXTENT_MAX for size in spec.shape):
            expected = f"at most {DIMS_MAX} dims of 0 to {EXTENT_MAX}"
            found = shortened(str(spec.shape))
            raise FormatError(file, f"tensors[{shortened(name)!r}].shape", expected, found)
        total += prod(spec.shape) * DTYPES[spec.dtype].itemsize
    return total


def _check_aliases(manifest: Manifest | Description, file: str) -> None:
    for alias, name in manifest.aliases.items():
        field = f"aliases[{shortened(alias)!r}]"
        fault = name_fault(alias)
        if fault is not None:
            raise FormatError(file, field, "a name", f"one that {fault}")
        if alias in manifest.tensors:
            raise FormatError(file, field, "a name that no tensor has", "a tensor's name")
        if name not in manifest.tensors:
            raise FormatError(file, field, "a tensor's name", shortened(repr(name)))


def _check_images(manifest: Manifest, file: str) -> int:
    """Check the images' records; return how many bytes of data they have together."""
    total, rank_before = 0, -1
    for index, image in enumerate(manifest.images):
        field = f"images[{index}]"
        if not rank_before < image.rank < mesh_size(manifest.mesh):
            expected = f"above {rank_before} and below {mesh_size(manifest.mesh)}"
            raise FormatError(file, f"{field}.rank", expected, f"{image.rank}")
        rank_before = image.rank
        most = HEADER_BYTES_MAX + ALIGNMENT_BYTES
        if not 1 <= image.header_bytes <= most or image.header_bytes % ALIGNMENT_BYTES:
            expected = f"a multiple of {ALIGNMENT_BYTES}, at most {most}"
            raise FormatError(file, f"{field}.header_bytes", expected, f"{image.header_bytes}")
        data_bytes = image.size_bytes - image.header_bytes
        if not 1 <= data_bytes <= EXTENT_MAX:
            expected = f"1 to {EXTENT_MAX} bytes more than the header"
            raise FormatError(file, f"{field}.size_bytes", expected, f"{image.size_bytes}")
        check_digest(image.digest, file, f"{field}.digest")
        total += data_bytes
    return total


def _check_encoded(manifest: Manifest, file: str) -> None:
    images = {image.rank: image for image in manifest.images}
    rank_before = -1
    for index, encoded in enumerate(manifest.encoded):
        field = f"encoded[{index}]"
        image = images.get(encoded.rank)
        if image is None or encoded.rank <= rank_before:
            expected = f"a rank above {rank_before} with an image"
            raise FormatError(file, f"{field}.rank", expected, f"{encoded.rank}")
        rank_before = encoded.rank
        data_bytes = image.size_bytes - image.header_bytes
        check_encoded(encoded, image.header_bytes, data_bytes, file, field)

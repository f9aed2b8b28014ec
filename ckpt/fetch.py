"""Reading the headers of images, checked against the digests that the manifest vouches for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keys import manifest_key, stored_key
from keepstep.ckpt.manifest import ImageRecord, Manifest
from keepstep.ckpt.plain_view import plain_view
from keepstep.storage.store import Store


def fetch_headers(store: Store, manifest: Manifest, ranks: Iterable[int]) -> dict[int, ImageHeader]:
    """The headers of the images of `ranks`, checked against the manifest.

    Raises:
        Corrupt: if a header is not the one that the manifest vouches for.
        FormatError: if the manifest has no such image, if one has another size, or if a header is
            malformed or of another job, state, rank, mesh or plan.
        StoreError: as the store raises it.
    """
    records = {record.rank: record for record in manifest.images}
    view = plain_view(store, manifest)
    return {rank: fetch_header(view, manifest, records, rank) for rank in ranks}


def fetch_header(
    store: Store, manifest: Manifest, records: Mapping[int, ImageRecord], rank: int
) -> ImageHeader:
    """The header of one image. Raises as `fetch_headers`.

    Args:
        store: the `plain_view` of the store.
        records: the manifest's, by rank.
    """
    key = stored_key(manifest, rank)
    record = records.get(rank)
    if record is None:
        raise FormatError(
            manifest_key(manifest.state), "images", f"an image of rank {rank}", "none"
        )
    size_bytes = store.stat(key).size_bytes
    if size_bytes != record.size_bytes:
        raise FormatError(key, "size", f"{record.size_bytes} bytes", f"{size_bytes}")
    data = store.get_range(key, 0, record.header_bytes)
    digest = digest128(data)
    if digest != record.digest:
        raise Corrupt(key, "header", f"digest {record.digest}", digest, offset=0)
    header = parse(data, key, record.size_bytes)
    check_belongs(header, manifest, rank, key)
    return header


def check_belongs(header: ImageHeader, manifest: Manifest, rank: int, key: str) -> None:
    """Raise FormatError unless the header is of the manifest's job, state, mesh and plan."""
    for field, expected, found in (
        ("job", manifest.job, header.job),
        ("state", manifest.state, header.state),
        ("rank", rank, header.rank),
        ("mesh", manifest.mesh, header.mesh),
        ("plan", manifest.plan_digest, header.plan_digest),
    ):
        if expected != found:
            raise FormatError(key, field, f"{expected}, as in the manifest", str(found))

"""A cheap look at whether a commit's files are there; `verify` is the thorough one."""

from __future__ import annotations

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.ckpt.lineage import Committed
from keepstep.ckpt.manifest import MANIFEST_BYTES_MAX, decode_manifest
from keepstep.storage.errors import NotFound, TooLarge
from keepstep.storage.store import Store


def is_present(store: Store, commit: Committed) -> bool:
    """Whether the manifest is the one committed, and each image is there with its size.

    Reads the manifest alone. Raises StoreError if the store cannot be read.
    """
    key = manifest_key(commit.state)
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
        if digest128(data) != commit.manifest_digest:
            return False
        images = decode_manifest(data, key).images
        return all(
            store.stat(image_key(commit.state, image.rank)).size_bytes == image.size_bytes
            for image in images
        )
    except (NotFound, TooLarge, FormatError):
        return False

"""A cheap look at whether a commit's files are there; `verify` is the thorough one."""

from __future__ import annotations

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import manifest_key, stored_key
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
        manifest = decode_manifest(data, key)
        return all(
            store.stat(stored_key(manifest, rank)).size_bytes == size_bytes
            for rank, size_bytes in manifest.stored_bytes().items()
        )
    except (NotFound, TooLarge, FormatError):
        return False

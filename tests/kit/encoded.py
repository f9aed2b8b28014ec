"""Checkpoints whose images lie encoded in the store, made from plain ones."""

from __future__ import annotations

import msgspec
import numpy as np
from tests.kit.make_store import Content, begin, write_images

from keepstep.ckpt.arrays import Array
from keepstep.ckpt.commit import commit
from keepstep.ckpt.image_encoder import ImageEncoder
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.keys import encoded_key, image_key
from keepstep.ckpt.manifest import Manifest, State
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

READ_BYTES_MAX = 1 << 30
STATE = State(1, 1)


def weights(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers as trained weights are: nearly all of a few magnitudes."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)


def encode_images(store: Store, plain: Store, manifest: Manifest) -> Manifest:
    """Put the images of a manifest into `store`, encoded where that pays. Returns its manifest."""
    found = []
    for record in manifest.images:
        key = image_key(manifest.state, record.rank)
        data = plain.get(key, READ_BYTES_MAX)
        header = parse(data[: header_size(data, key, len(data))], key, len(data))
        target = encoded_key(manifest.state, record.rank)
        encoder = ImageEncoder([data], header, target)
        encoded = encoder.measure()
        if encoded is None:
            store.put(key, data)
        else:
            store.put_stream(target, encoder, encoded.size_bytes)
            found.append(encoded)
    return msgspec.structs.replace(manifest, encoded=tuple(found))


def make_encoded_store(store: Store, content: Content) -> Manifest:
    """Commit the content at `STATE`, encoded."""
    log = begin(store, content.mesh)
    plain = MemoryStore()
    manifest = encode_images(store, plain, write_images(plain, content, STATE))
    commit(log, manifest)
    return manifest

"""One host's way to the store: an image, then its done record. What others have done, by theirs.

states/g000003/s000000000120/r00005.safetensors  the image, first (with .zst if it is encoded)
states/g000003/s000000000120/r00005.json         its done record, when the image is durable
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keepstep.ckpt.document import decode, encode
from keepstep.ckpt.encoding import EncodedImage, check_encoded
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.keys import (
    DoneKey,
    ManifestKey,
    done_key,
    encoded_key,
    image_key,
    parse_key,
    state_prefix,
)
from keepstep.ckpt.manifest import DoneRecord, ImageRecord, State, check_digest, done_record
from keepstep.storage.store import Buffer, Store

DONE_BYTES_MAX = 1 << 22
"""Room for the frames of the largest image that is encoded."""


class StoreTier:
    """The images of one host in the store. Thread-safe; every method blocks for the store.

    All raise StoreError.

    Args:
        store: the durable one.
        compresses: whether to encode images where that pays.
    """

    def __init__(self, store: Store, compresses: bool = False) -> None:
        self.store = store
        self._compresses = compresses

    def settled(self, state: State, record: ImageRecord) -> DoneRecord | None:
        """The done record if nothing is left to do for an image; else None.

        That is so if it is done, or its state has a manifest; then it may have been committed, and
        the record is made up if it is gone.

        Raises FormatError if there is a done record of another image under its name.
        """
        keys = [parse_key(info.key) for info in self.store.list(state_prefix(state))]
        if DoneKey(state, record.rank) in keys:
            done = read_done(self.store, state, record.rank)
            if done.image != record:
                key = done_key(state, record.rank)
                raise FormatError(key, "", f"{record}", f"{done.image}")
            return done
        return done_record(record) if ManifestKey(state) in keys else None

    def put(
        self,
        state: State,
        record: ImageRecord,
        header: ImageHeader,
        stream: Iterable[Buffer],
        check: Callable[[], None] | None = None,
    ) -> DoneRecord:
        """Write the image, then its done record, which is returned. Both durable on return.

        Args:
            state: whose image it is.
            record: of the image.
            header: of it.
            stream: its bytes; can be read several times, and raises Corrupt before its last piece
                if they are wrong.
            check: called between the two; what it raises leaves the image without a done record,
                and so unreferenced.
        """
        encoded = self._put_encoded(state, header, stream) if self._compresses else None
        if encoded is None:
            self.store.put_stream(image_key(state, record.rank), stream, record.size_bytes)
        if check is not None:
            check()
        done = done_record(record, encoded)
        self.store.put(done_key(state, record.rank), encode(done))
        return done

    def _put_encoded(
        self, state: State, header: ImageHeader, stream: Iterable[Buffer]
    ) -> EncodedImage | None:
        """Write the image encoded; None, and nothing written, if that does not pay."""
        # Late: numpy costs a keeper's start more than all else.
        from keepstep.ckpt.image_encoder import ImageEncoder

        key = encoded_key(state, header.rank)
        encoder = ImageEncoder(stream, header, key)
        encoded = encoder.measure()
        if encoded is not None:
            self.store.put_stream(key, encoder, encoded.size_bytes)
        return encoded


def done_ranks(store: Store, state: State) -> list[int]:
    """The ranks with a done record of `state`, ascending. Raises StoreError."""
    keys = (parse_key(info.key) for info in store.list(state_prefix(state)))
    return [key.rank for key in keys if isinstance(key, DoneKey)]


def read_done(store: Store, state: State, rank: int) -> DoneRecord:
    """A done record, checked in itself.

    Raises FormatError (file and field), NotFound, StoreError.
    """
    key = done_key(state, rank)
    record = decode(store.get(key, DONE_BYTES_MAX), DoneRecord, bytes_max=DONE_BYTES_MAX, file=key)
    if record.rank != rank:
        raise FormatError(key, "rank", f"{rank}", f"{record.rank}")
    if not 0 < record.header_bytes < record.size_bytes:
        found = f"{record.header_bytes} of {record.size_bytes}"
        raise FormatError(key, "header_bytes", "more than 0, and less than size_bytes", found)
    check_digest(record.digest, key, "digest")
    if record.encoded is not None:
        if record.encoded.rank != rank:
            raise FormatError(key, "encoded.rank", f"{rank}", f"{record.encoded.rank}")
        data_bytes = record.size_bytes - record.header_bytes
        check_encoded(record.encoded, record.header_bytes, data_bytes, key, "encoded")
    return record

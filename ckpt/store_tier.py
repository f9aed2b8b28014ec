"""One host's way to the store: an image, then its done record. What others have done, by theirs.

states/g000003/s000000000120/r00005.safetensors  the image, first
states/g000003/s000000000120/r00005.json         its done record, when the image is durable
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keepstep.ckpt.document import decode, encode
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import (
    DoneKey,
    ManifestKey,
    done_key,
    image_key,
    parse_key,
    state_prefix,
)
from keepstep.ckpt.manifest import ImageRecord, State, check_digest
from keepstep.storage.store import Buffer, Store

DONE_BYTES_MAX = 4_096


class StoreTier:
    """The images of one host in the store. Thread-safe; every method blocks for the store.

    All raise StoreError.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def is_settled(self, state: State, record: ImageRecord) -> bool:
        """Whether nothing is left to do for an image: it is done, or its state has a manifest.

        Raises FormatError if there is a done record of another image under its name.
        """
        for info in self.store.list(state_prefix(state)):
            key = parse_key(info.key)
            if isinstance(key, ManifestKey):
                return True
            if key == DoneKey(state, record.rank):
                done = read_done(self.store, state, record.rank)
                if done != record:
                    raise FormatError(info.key, "", f"{record}", f"{done}")
                return True
        return False

    def put(
        self,
        state: State,
        record: ImageRecord,
        stream: Iterable[Buffer],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Write the image, then its done record. Both durable on return.

        Args:
            state: whose image it is.
            record: of the image.
            stream: its bytes; can be read several times, and raises Corrupt before its last piece
                if they are wrong.
            check: called between the two; what it raises leaves the image without a done record,
                and so unreferenced.
        """
        self.store.put_stream(image_key(state, record.rank), stream, record.size_bytes)
        if check is not None:
            check()
        self.store.put(done_key(state, record.rank), encode(record))


def done_ranks(store: Store, state: State) -> list[int]:
    """The ranks with a done record of `state`, ascending. Raises StoreError."""
    keys = (parse_key(info.key) for info in store.list(state_prefix(state)))
    return [key.rank for key in keys if isinstance(key, DoneKey)]


def read_done(store: Store, state: State, rank: int) -> ImageRecord:
    """A done record, checked in itself.

    Raises FormatError (file and field), NotFound, StoreError.
    """
    key = done_key(state, rank)
    record = decode(store.get(key, DONE_BYTES_MAX), ImageRecord, bytes_max=DONE_BYTES_MAX, file=key)
    if record.rank != rank:
        raise FormatError(key, "rank", f"{rank}", f"{record.rank}")
    if not 0 < record.header_bytes < record.size_bytes:
        found = f"{record.header_bytes} of {record.size_bytes}"
        raise FormatError(key, "header_bytes", "more than 0, and less than size_bytes", found)
    check_digest(record.digest, key, "digest")
    return record

"""An image on its way to a tier: verified beside the writing, not before it.

The last piece of the stream is given out only when all chunks have been compared with the header's
checksums, so a store, which shows an object whole or not at all, never shows a wrong one. Hashing
is several times faster than a disk, and costs no time where there is a core for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_digest, digest128
from keepstep.ckpt.errors import Corrupt
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.manifest import ImageRecord
from keepstep.storage.store import Store

PIECE_BYTES = 16 << 20
_CHUNKS_A_PIECE = PIECE_BYTES // CHUNK_BYTES


class MemoryStream:
    """An image in memory, as pieces that share that memory. Can be read several times.

    Iterating raises Corrupt (tensor and offset; `file` is `where`) before the last piece, or, where
    the memory was not kept meanwhile, instead of coming to an end.

    Args:
        view: all of the image's bytes, sealed.
        header: of it.
        record: of it; the header in memory must have its digest.
        where: the image, for the error.
        executor: whose threads compare.
        is_kept: whether nobody may have written over the memory until now. Asked when the last
            piece was taken: if not, all is compared once more.
    """

    def __init__(
        self,
        view: memoryview,
        header: ImageHeader,
        record: ImageRecord,
        where: str,
        executor: Executor,
        is_kept: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_kept = is_kept
        self._view = view[: record.size_bytes]
        self._header = header
        self._record = record
        self._where = where
        self._executor = executor

    def __iter__(self) -> Iterator[memoryview]:
        verified = self._begin_verifying()
        whole = self._view.nbytes - 1
        last = whole - whole % PIECE_BYTES
        for start in range(0, last, PIECE_BYTES):
            yield self._view[start : start + PIECE_BYTES]
        verified()
        yield self._view[last:]
        # A store that writes each piece before it asks for the next has shown nothing yet.
        if not self._is_kept():
            self.verify()

    def _begin_verifying(self) -> Callable[[], None]:
        """Returns what waits for the end of it."""
        try:
            return self._executor.submit(self.verify).result
        except RuntimeError:  # shut down: who waited for a hanging disk has given it up
            return self.verify

    def verify(self) -> None:
        """Compare everything with the checksums. Raises Corrupt."""
        header_bytes = self._record.header_bytes
        check_header(self._view[:header_bytes], self._record, self._where)
        data = self._view[header_bytes:]
        for number in range(len(self._header.digests)):
            start = number * CHUNK_BYTES
            check_chunk(self._header, number, data[start : start + CHUNK_BYTES], self._where)


class CopyStream:
    """An image in a store near by, read piece by piece. Can be read several times.

    Iterating raises Corrupt (`file` is the key in that store), and StoreError.
    """

    def __init__(self, store: Store, key: str, header: ImageHeader, record: ImageRecord) -> None:
        self._store = store
        self._key = key
        self._header = header
        self._record = record

    def __iter__(self) -> Iterator[memoryview]:
        head = memoryview(self._store.get_range(self._key, 0, self._record.header_bytes))
        check_header(head, self._record, self._key)
        yield head
        for first in range(0, len(self._header.digests), _CHUNKS_A_PIECE):
            yield self._piece(first)

    def _piece(self, first: int) -> memoryview:
        """The chunks from `first` on, compared. In memory of its own: parts wait to be sent."""
        start = first * CHUNK_BYTES
        size = min(PIECE_BYTES, self._header.data_bytes - start)
        piece = memoryview(bytearray(size))
        self._store.read_into(self._key, self._record.header_bytes + start, piece)
        for number in range(-(-size // CHUNK_BYTES)):
            chunk = piece[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            check_chunk(self._header, first + number, chunk, self._key)
        return piece


def check_header(head: memoryview, record: ImageRecord, where: str) -> None:
    """Raise Corrupt unless `head` is the header that the record was made of."""
    found = digest128(head)
    if found != record.digest:
        raise Corrupt(where, "header", f"digest {record.digest}", f"digest {found}", offset=0)


def check_chunk(header: ImageHeader, number: int, chunk: memoryview, where: str) -> None:
    """Raise Corrupt unless `chunk` is chunk `number` of the image with this header."""
    found = chunk_digest(chunk)
    if found == header.digests[number]:
        return
    start = number * CHUNK_BYTES
    names = header.names_at(start, chunk.nbytes)
    raise Corrupt(
        where,
        f"chunk {number} ({', '.join(names[:3])})",
        f"checksum {header.digests[number]}",
        found,
        tensor=names[0] if names else None,
        offset=header.header_bytes + start,
    )

"""Writing one new file from front to back, past the page cache where that pays.

Big aligned pieces go by O_DIRECT: on the machine this was measured on, 2.3 GB/s against 1.3-1.7
buffered, and the page cache stays the trainer's. Whether memory, file system and device agree to it
is not asked beforehand: the kernel says EINVAL, and the rest goes through the page cache.
"""

from __future__ import annotations

import errno

from keepstep.storage.posix import Posix
from keepstep.storage.store import Buffer

BLOCK_BYTES = 4_096
DIRECT_BYTES_MIN = 1 << 20
WRITE_BYTES_MAX = 16 << 20


def as_bytes_view(data: Buffer) -> memoryview:
    """`data` as a flat view of bytes, not copied. Raises ValueError if it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data is not contiguous in memory; pass a contiguous buffer")
    if view.nbytes == 0:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    return view.cast("B")


class SequentialWriter:
    """Appends to a file that `Posix.create` opened. Not durable until the caller's fsync."""

    def __init__(self, posix: Posix, fd: int) -> None:
        self._posix = posix
        self._fd = fd
        self._direct_possible = True
        self._direct = False
        self.size_bytes = 0

    def write(self, data: memoryview) -> None:
        """Append all of `data`. Raises OSError; the file then holds some part of it."""
        done = self._write_direct(data) if self._wants_direct(data) else 0
        if done < data.nbytes:
            self._switch(direct=False)
            while done < data.nbytes:
                done += self._write_once(data[done : done + WRITE_BYTES_MAX])

    def _wants_direct(self, data: memoryview) -> bool:
        aligned = self.size_bytes % BLOCK_BYTES == 0
        return self._direct_possible and aligned and data.nbytes >= DIRECT_BYTES_MIN

    def _write_direct(self, data: memoryview) -> int:
        """Write whole blocks from the front of `data`; how many bytes that were."""
        done = 0
        whole = data.nbytes - data.nbytes % BLOCK_BYTES
        try:
            self._switch(direct=True)
            while done < whole and done % BLOCK_BYTES == 0:
                done += self._write_once(data[done : min(whole, done + WRITE_BYTES_MAX)])
        except OSError as error:
            # EINVAL: this memory or this file system cannot. Anything else is a real failure.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._direct_possible = False
        return done

    def _write_once(self, data: memoryview) -> int:
        written = self._posix.pwrite(self._fd, data, self.size_bytes)
        if written == 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        self.size_bytes += written
        return written

    def _switch(self, direct: bool) -> None:
        if self._direct != direct:
            self._posix.set_direct(self._fd, direct)
            self._direct = direct

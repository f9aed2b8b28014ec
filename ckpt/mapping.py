"""Memory mappings, made present without a signal: what cannot be had is an error, not a SIGBUS.

A page that a mapping does not have yet is brought on first touch. If that fails (a damaged disk, a
full tmpfs, a file cut short), the kernel kills the process. `MADV_POPULATE_READ` and `_WRITE`
(Linux 5.14) bring it beforehand and return an error instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from keepstep.ckpt.errors import CheckpointError

_MAP_NORESERVE = 0x4000
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_PAGE_BYTES = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS)


class StageTooLarge(CheckpointError, MemoryError):
    """There is not the memory to stage a state in."""


def populate(view: memoryview) -> None:
    """Make the pages of `view` present for reading. Blocking.

    Raises OSError if some cannot be had. Where the kernel is too old, does nothing.
    """
    number = _advise(view, _POPULATE_READ)
    if number and number not in _UNSUPPORTED:
        raise OSError(number, f"the memory cannot be read: {os.strerror(number)}")


class StageMemory:
    """Memory that images are staged in: virtual until it is written. Pages come with `reserve`.

    Args:
        size_bytes: how far it reaches.
        path: a file (of a tmpfs) that the host's ranks share, made by whoever comes first; None:
            this process's own memory.

    Raises OSError.
    """

    def __init__(self, size_bytes: int, path: Path | None = None) -> None:
        self._path = path
        self._fd = -1
        length = max(size_bytes, _PAGE_BYTES)
        if path is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self.view = memoryview(mmap.mmap(-1, length, flags=flags))
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(self._fd, length)
            self.view = memoryview(mmap.mmap(self._fd, length))
        except OSError:
            self.close()
            raise

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Make the pages of a range present for writing.

        Raises StageTooLarge if there is not the memory.
        """
        start = offset // _PAGE_BYTES * _PAGE_BYTES
        end = min(-(-(offset + size_bytes) // _PAGE_BYTES) * _PAGE_BYTES, len(self.view))
        number = _advise(self.view[start:end], _POPULATE_WRITE)
        if number in _UNSUPPORTED and self._fd >= 0:
            try:
                os.posix_fallocate(self._fd, start, end - start)
            except OSError as error:
                number = error.errno or errno.ENOSPC
            else:
                number = 0
        if number and number not in _UNSUPPORTED:
            where = "memory" if self._path is None else f"{self._path.parent}"
            raise StageTooLarge(
                f"staging {size_bytes:,} bytes more in {where} failed: {os.strerror(number)}; "
                "use fewer ranks a host, more memory, or a larger tmpfs"
            )

    def unlink(self) -> None:
        """Take the file's name away; who has it open keeps the memory. No error if it is gone."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of it. The memory goes with the last tensor that looks into it."""
        self.view = memoryview(b"")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _advise(view: memoryview, advice: int) -> int:
    """madvise over the pages that `view` touches: 0, or the error's number."""
    if not view.nbytes:
        return 0
    start = np.frombuffer(view, np.uint8).ctypes.data
    first = start // _PAGE_BYTES * _PAGE_BYTES
    if _LIBC.madvise(first, start + view.nbytes - first, advice) == 0:
        return 0
    return ctypes.get_errno()

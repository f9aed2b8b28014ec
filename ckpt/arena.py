"""One block of memory that holds an image byte for byte, made once and used for every save.

First touch of memory is several times slower than a copy, so it happens here and never again.
"""

from __future__ import annotations

import mmap
from types import TracebackType

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.host_memory import HEADROOM_BYTES, available_bytes

PAGE_BYTES = 4096

_TOUCH_BYTES = 1 << 20


class ArenaTooLarge(CheckpointError, MemoryError):
    """The machine has less memory than the arena needs; the message has both numbers."""


class Arena:
    """Page-aligned anonymous memory of at least `size_bytes`, every page of these touched.

    Args:
        size_bytes: what must fit.
        what: who needs it, for the message of the error.
        spare_bytes: more room behind it that costs no memory until it is used. `capacity_bytes` is
            both together, in whole pages.

    Raises:
        ArenaTooLarge: before anything is allocated, if the memory that the system calls available
            is too small.
    """

    def __init__(self, size_bytes: int, what: str = "an image", spare_bytes: int = 0) -> None:
        touched_bytes = max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES
        self.capacity_bytes = touched_bytes + -(-spare_bytes // PAGE_BYTES) * PAGE_BYTES
        left_bytes = available_bytes()
        if touched_bytes + HEADROOM_BYTES > left_bytes:
            raise ArenaTooLarge(
                f"{what} needs an arena of {touched_bytes:,} bytes, but only "
                f"{left_bytes:,} bytes of memory are available (of which "
                f"{HEADROOM_BYTES:,} are left free); use fewer ranks a host, or more memory"
            )
        self.view = memoryview(mmap.mmap(-1, self.capacity_bytes))
        """All of it, writable."""
        zeros = bytes(min(_TOUCH_BYTES, touched_bytes))
        for start in range(0, touched_bytes, _TOUCH_BYTES):
            end = min(start + _TOUCH_BYTES, touched_bytes)
            self.view[start:end] = zeros[: end - start]

    def close(self) -> None:
        """Let go of the memory. It is unmapped with the last tensor that looks into it.

        Not before: torch keeps the buffer's owner, but does not hinder anybody from unmapping it.
        """
        self.view = memoryview(b"")

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

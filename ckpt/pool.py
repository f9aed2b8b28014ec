"""The pool: one file in shared memory that holds all images of a host, and outlives processes (D5).

The keeper makes the file, and memory for slots as they are needed, before anything steps. Ranks
open it, write images into their slots in place, and say so in the table (`pool_table`). Memory is
refused with numbers while nothing has happened yet: touching a page that shared memory cannot give
would be SIGBUS.

A slot in the file: `VALUES_BYTES` for the state's JSON values, then the image from the boundary of
a page on. A slot keeps its place in the file for good, so that a mapping never goes wrong.

Views handed out stay good after `close`: memory is unmapped with the last object that looks into
it. It is never unmapped before, since torch keeps the buffer of a tensor but hinders nobody from
unmapping it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.host_memory import HEADROOM_BYTES, available_bytes
from keepstep.ckpt.pool_errors import PoolDamaged, PoolFull, PoolTooLarge
from keepstep.ckpt.pool_table import (
    SEATS_MAX,
    SLOTS_MAX,
    TABLE_BYTES,
    VALUES_BYTES,
    Header,
    Seat,
    SlotRow,
    SlotStatus,
)

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY

_STRIDE_BYTES = 64 << 20  # of one system call, so that signals are served between them
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Slot(SlotRow):
    """A slot: its row of the table, and its memory, mapped when it is first asked for."""

    def __init__(self, words: memoryview, index: int, fd: _Fd) -> None:
        super().__init__(words, index)
        self._fd = fd
        self._lock = threading.Lock()
        self._view: memoryview | None = None

    @property
    def image(self) -> memoryview:
        """The image's memory, writable: `capacity_bytes` long, whatever is in it."""
        return self._mapped()[VALUES_BYTES:]

    @property
    def values(self) -> bytes:
        """The JSON values that the writer left, copied."""
        return bytes(self._mapped()[: min(self.values_bytes, VALUES_BYTES)])

    def captured(self, values: bytes, size_bytes: int) -> None:
        """FILLING -> CAPTURED, by the writer: `size_bytes` of image are in place; so are `values`.

        Raises NotRepresentable for values longer than `VALUES_BYTES`, ValueError for a size beyond
        the capacity (both: nothing is done), and WrongStatus.
        """
        if len(values) > VALUES_BYTES:
            raise NotRepresentable(
                "values",
                f"{len(values):,} bytes of JSON, of at most {VALUES_BYTES:,}; put what is large "
                "into a tensor",
            )
        if not 0 <= size_bytes <= self.capacity_bytes:
            raise ValueError(f"an image of {size_bytes} bytes in {self.capacity_bytes}")
        self._expect(SlotStatus.FILLING)
        self._mapped()[: len(values)] = values
        self._order()
        self.written(size_bytes, len(values))

    def prefault(self) -> None:
        """Have this process's page tables know all of the slot's memory. Changes no byte.

        Blocking: up to some tenths of a second for each GB.

        Raises PoolTooLarge if shared memory turns out not to have it.
        """
        view = self._mapped()
        _touch(view.obj, view, f"slot {self.index}")

    def forget(self) -> None:
        """Let this process's mapping go with the last view of it."""
        with self._lock:
            self._view = None

    def _mapped(self) -> memoryview:
        with self._lock:
            if self._view is None:
                start, length = self.values_offset_bytes, VALUES_BYTES + self.capacity_bytes
                file_bytes = os.fstat(self._fd.number).st_size
                if start < TABLE_BYTES or start % PAGE_BYTES or start + length > file_bytes:
                    raise PoolDamaged(
                        f"slot {self.index} is said to be at {start:,} to {start + length:,} of a "
                        f"file of {file_bytes:,} bytes"
                    )
                self._view = memoryview(mmap.mmap(self._fd.number, length, offset=start))
            return self._view

    def _order(self) -> None:
        """Have all that was written before be seen before all that comes: where stores may pass
        each other, a lock that is let go and taken again keeps them apart."""
        for _ in range(2):
            with self._lock:
                pass


class Pool:
    """An open pool. One process makes it (`create`) and its slots; all others `open` it.

    Attributes:
        path: of the file.
        seats: 64, by index.
        header: for the fence.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over `fd`. Use `create` or `open`."""
        self.path = path
        self._fd = _Fd(fd)
        words = memoryview(mmap.mmap(fd, TABLE_BYTES)).cast("Q")
        self._words = words
        self._slots: list[Slot] = []
        self._lock = threading.Lock()
        self._making = threading.Lock()  # the keeper's threads make and remove one at a time
        self.header = Header(words)
        self.seats: Sequence[Seat] = tuple(Seat(words, index) for index in range(SEATS_MAX))

    @classmethod
    def create(cls, path: Path) -> Pool:
        """A new, empty pool at `path`, mode 0600. It is there whole or not at all. Blocking.

        Raises FileExistsError, PoolTooLarge, and OSError.
        """
        draft = path.with_name(f"{path.name}.new")
        draft.unlink(missing_ok=True)
        fd = os.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                _allocate(fd, 0, TABLE_BYTES, f"the table of {path}")
                pool = cls(path, fd)
            except BaseException:
                os.close(fd)
                raise
            pool.header.begin()
            try:
                os.link(draft, path)
            except OSError:
                pool.close()
                raise
        finally:
            draft.unlink(missing_ok=True)
        return pool

    @classmethod
    def open(cls, path: Path) -> Pool:
        """The pool at `path`. Raises FileNotFoundError, PoolDamaged, and OSError (a symlink)."""
        fd = os.open(path, _FLAGS)
        try:
            _check_file(path, os.fstat(fd))
            pool = cls(path, fd)
        except BaseException:
            os.close(fd)
            raise
        try:
            pool.header.check(str(path))
        except PoolDamaged:
            pool.close()
            raise
        return pool

    @property
    def slots(self) -> Sequence[Slot]:
        """All slots, by index; those that were removed, or are being made, are ABSENT.

        Ask again to see slots that another process added meanwhile.
        """
        with self._lock:
            for index in range(len(self._slots), self.header.rows):
                self._slots.append(Slot(self._words, index, self._fd))
            return tuple(self._slots)

    def add_slot(self, capacity_bytes: int, what: str = "an image") -> Slot:
        """By the keeper: a FREE slot for images up to `capacity_bytes`, all of it touched.

        Takes the place of a removed slot, if one of at most twice that capacity is there.
        Blocking: first touch of memory runs at 0.4 to 2 GB/s.

        Args:
            capacity_bytes: the largest image that must fit.
            what: who needs it, for the message of an error.

        Raises:
            PoolTooLarge: shared memory, or the machine's, does not suffice. Nothing has changed.
            PoolFull: the table has no row left.
        """
        with self._making:
            return self._add_slot(max(1, -(-capacity_bytes // PAGE_BYTES)) * PAGE_BYTES, what)

    def remove_slot(self, index: int) -> int:
        """By the keeper: the slot becomes ABSENT, and its memory goes back to the system.

        Whoever looks into it still sees zeros. Returns the bytes given back: 0 on a file system
        that cannot make holes (the memory serves the next slot that fits, then).
        """
        slot = self.slots[index]
        with self._making:
            slot.absent()
            slot.forget()
            return self._punch(slot.values_offset_bytes, VALUES_BYTES + slot.capacity_bytes)

    def close(self) -> None:
        """Close the file. Views and slots handed out stay good as long as somebody has them."""
        self._fd.close()
        with self._lock:
            self._slots.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add_slot(self, capacity: int, what: str) -> Slot:
        slots = self.slots
        fitting = [
            slot
            for slot in slots
            if slot.status is SlotStatus.ABSENT and capacity <= slot.capacity_bytes <= 2 * capacity
        ]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.capacity_bytes)
            self._make(slot, what)
            return slot
        if len(slots) == SLOTS_MAX:
            raise PoolFull(f"{self.path}: all {SLOTS_MAX} slots are in use; start a new pool")
        # Who dies in here leaves an ABSENT row, whose place serves the next slot that fits.
        index, start = len(slots), self.header.data_end
        row = SlotRow(self._words, index)
        row.absent()  # whatever who died before left there
        row.place(start, capacity)
        self.header.data_end = start + VALUES_BYTES + capacity
        self.header.rows = index + 1
        slot = self.slots[index]
        try:
            self._make(slot, what)
        except BaseException:
            with self._lock:
                self.header.rows, self.header.data_end = index, start
                del self._slots[index:]
            raise
        return slot

    def _make(self, slot: Slot, what: str) -> None:
        """Allocate and touch the memory of an ABSENT slot, then have it be FREE."""
        start, length = slot.values_offset_bytes, VALUES_BYTES + slot.capacity_bytes
        purpose = f"{what} needs a slot of {length:,} bytes in {self.path}"
        _allocate(self._fd.number, start, length, purpose)
        try:
            slot.prefault()
        except PoolTooLarge:
            slot.forget()
            self._punch(start, length)
            raise
        slot.present()

    def _punch(self, start: int, length: int) -> int:
        with mmap.mmap(self._fd.number, length, offset=start) as memory:
            try:
                memory.madvise(mmap.MADV_REMOVE)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    return 0
                raise
        return length


class _Fd:
    """A descriptor that a pool and its slots share."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise PoolDamaged(f"{path} is not a file of user {os.geteuid()}; remove it")
    if found.st_size < TABLE_BYTES:
        raise PoolDamaged(
            f"{path} has {found.st_size} bytes, a pool {TABLE_BYTES} or more; remove it with "
            "`keepstep clean`"
        )


def _allocate(fd: int, start: int, length: int, purpose: str) -> None:
    """Give the file memory at [start, start + length); else raise PoolTooLarge and take none."""
    memory_bytes = available_bytes() - HEADROOM_BYTES
    system = os.fstatvfs(fd)
    file_bytes = system.f_bavail * system.f_frsize
    if length > memory_bytes:
        raise PoolTooLarge(
            f"{purpose}, but only {max(memory_bytes, 0):,} bytes of memory are available (besides "
            f"{HEADROOM_BYTES:,} that are left free); use fewer ranks or slots a host, or more "
            "memory",
            needed_bytes=length,
            available_bytes=max(memory_bytes, 0),
        )
    if length > file_bytes:
        raise _no_room(purpose, length, file_bytes)
    for offset in range(start, start + length, _STRIDE_BYTES):
        try:
            os.posix_fallocate(fd, offset, min(_STRIDE_BYTES, start + length - offset))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
                raise
            if offset > start:
                with mmap.mmap(fd, offset - start, offset=start) as memory:
                    memory.madvise(mmap.MADV_REMOVE)
            raise _no_room(purpose, length, file_bytes) from error


def _no_room(purpose: str, needed_bytes: int, available: int) -> PoolTooLarge:
    return PoolTooLarge(
        f"{purpose}, but its file system has only {available:,} bytes free; give it more (in a "
        "pod: an emptyDir with medium Memory and a sizeLimit; else `mount -o remount,size=...`), "
        "or choose another shm_dir",
        needed_bytes=needed_bytes,
        available_bytes=available,
    )


def _touch(memory: object, view: memoryview, what: str) -> None:
    """Touch all pages of a mapping without changing a byte."""
    if not isinstance(memory, mmap.mmap):
        raise TypeError(f"{what}: {type(memory).__name__} is not a mapping")
    for start in range(0, len(view), _STRIDE_BYTES):
        length = min(_STRIDE_BYTES, len(view) - start)
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno == errno.EINVAL:  # an older kernel: read a byte of each page
                view[start : start + length : PAGE_BYTES].tobytes()
                continue
            if error.errno not in (errno.ENOMEM, errno.EFAULT):
                raise
            raise PoolTooLarge(
                f"{what}: no memory for bytes {start:,} to {start + length:,} of {len(view):,}: "
                "it was promised and is not there; free memory on this host",
                needed_bytes=len(view),
                available_bytes=start,
            ) from error

"""The few file-system calls that `FileStore` makes, one method each.

This is the seam: tests record what a store does to the disk, or let a call fail, by a subclass.
Names are always relative to an open directory, so a directory that is swapped for a symbolic link
meanwhile leads nowhere else. All methods raise OSError as the system reports it. Interrupted calls
(EINTR) are tried again by Python itself (PEP 475).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_MODE = 0o666  # the user's umask decides


class Posix:
    """System calls, as they are."""

    def open_root(self, path: str) -> int:
        """Open the store's own directory, to which symbolic links may lead."""
        return os.open(path, _DIRECTORY)

    def open_dir(self, name: str, dir_fd: int) -> int:
        """Open a directory; a symbolic link is refused with ENOTDIR or ELOOP."""
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)

    def open_read(self, name: str, dir_fd: int) -> int:
        """Open a file for reading; never waits for the other end of a pipe."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=dir_fd)

    def create(self, name: str, dir_fd: int) -> int:
        """Create a new file for writing; EEXIST if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _FILE_MODE, dir_fd=dir_fd)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Let writes to `fd` bypass the page cache, or not. EINVAL where that is not possible."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at `offset`; the number of bytes written."""
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Up to `length` bytes at `offset`; b"" at the end of the file."""
        return os.pread(fd, length, offset)

    def preadv(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """Read into `targets` from `offset` on; the number of bytes read, 0 at the end."""
        return os.preadv(fd, targets, offset)

    def fsync(self, fd: int) -> None:
        """Make the file's data and size durable; of a directory: its entries."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close; the descriptor is gone even if this raises."""
        os.close(fd)

    def rename(self, source: str, target: str, dir_fd: int) -> None:
        """Rename inside one directory, replacing `target` atomically."""
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def link(self, source: str, target: str, dir_fd: int) -> None:
        """Give the file a second name in the same directory; EEXIST if that is taken."""
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def unlink(self, name: str, dir_fd: int) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, name: str, dir_fd: int) -> None:
        """Make a directory; EEXIST if the name is taken."""
        os.mkdir(name, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        """What `fd` is."""
        return os.fstat(fd)

    def lstat(self, name: str, dir_fd: int) -> os.stat_result:
        """What `name` is; a symbolic link is not followed."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def entries(self, fd: int) -> list[tuple[str, os.stat_result]]:
        """Names in a directory and what they are, links not followed, in no order."""
        found = []
        with os.scandir(fd) as scan:
            for entry in scan:
                try:
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue  # removed since the directory was read
        return found

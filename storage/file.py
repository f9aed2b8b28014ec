"""A store in a directory of a file system, local or shared.

An object is a file at ``root/key``. It is written beside its place under a temporary name
(``.keepstep-tmp-NAME~16HEX``: no key can be that), fsynced, and only then renamed or linked there;
then the directory is fsynced. The directories above are fsynced *before* that moment, each time:
one that another process has just made may not be durable yet. So after a power loss an object is
the old one or the new one, whole, and what was acknowledged is there.

Links inside the root are never followed. `delete` removes the directories that it empties.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import quote

from keepstep.storage import directories
from keepstep.storage.errors import NotFound
from keepstep.storage.file_errors import FileErrors
from keepstep.storage.keys import check_key, check_prefix, is_key
from keepstep.storage.local import is_local
from keepstep.storage.posix import Posix
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo
from keepstep.storage.translate import Moment
from keepstep.storage.writer import SequentialWriter, as_bytes_view

_TEMPORARY = re.compile(r"\.keepstep-tmp-(?P<name>[A-Za-z0-9._=-]+)~[0-9a-f]{16}")
_ATTEMPTS_MAX = 100
_MAP_NORESERVE = 0x4000
_READ_BYTES_MAX = 1 << 30  # the system reads at most 2 GiB in one call


class FileStore:
    """Objects as files under `root`, which must exist; `locate.open_store` can make it.

    Safe between threads, processes and hosts, as far as the file system's rename and link are.
    """

    def __init__(self, root: str | os.PathLike[str], posix: Posix | None = None) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._posix = posix or Posix()
        self._errors = FileErrors(self._posix, self._root, self.url)

    @property
    def url(self) -> str:
        """``file:///...``, absolute."""
        return "file://" + quote(self._root)

    @property
    def capabilities(self) -> Capabilities:
        """Both; a file system without hard links says so at the first put_if_absent."""
        return Capabilities(put_if_absent=True, durable=True)

    # Writing.

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self._publish("put", key, [data], None, replace=True)

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """See `Store.put_stream`."""
        self._publish("put_stream", key, chunks, size_bytes, replace=True)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`. Permanent where the file system has no hard links."""
        self._publish("put_if_absent", key, [data], None, replace=False)

    def _publish(
        self,
        operation: str,
        key: str,
        chunks: Iterable[Buffer],
        size_bytes: int | None,
        *,
        replace: bool,
    ) -> None:
        *above, name = check_key(key, operation=operation, where=self.url)
        with self._errors.typed(operation, key), ExitStack() as stack:
            fds, temporary, file_fd = self._begin(stack, tuple(above), name)
            renamed = False
            try:
                self._fill(file_fd, key, chunks, size_bytes)
                for fd in reversed(fds[:-1]):
                    self._posix.fsync(fd)
                with self._errors.typed(operation, key, Moment.PUBLISHING):
                    if replace:
                        self._posix.rename(temporary, name, fds[-1])
                        renamed = True
                    else:
                        self._link(key, temporary, name, fds[-1])
            finally:
                if not renamed:
                    # What cannot be removed now is a leftover, which gc knows.
                    with suppress(OSError):
                        self._posix.unlink(temporary, fds[-1])
            with self._errors.typed(operation, key, Moment.AFTER):
                self._posix.fsync(fds[-1])

    def _begin(
        self, stack: ExitStack, above: tuple[str, ...], name: str
    ) -> tuple[tuple[int, ...], str, int]:
        """Open the directories, making what is missing, and a new temporary file.

        Returns the directories' descriptors, the file's name, and its descriptor. `stack` closes
        the directories.
        """
        temporary = f".keepstep-tmp-{name}~{os.urandom(8).hex()}"
        for _ in range(_ATTEMPTS_MAX):
            try:
                with ExitStack() as trial:
                    fds = trial.enter_context(directories.opened(self._posix, self._root, above))
                    file_fd = self._posix.create(temporary, fds[-1])
                    stack.push(trial.pop_all())
                    return fds, temporary, file_fd
            except FileNotFoundError:
                # Not made yet, or removed as empty by a delete since. Ours is in it from now on.
                with suppress(FileNotFoundError):
                    directories.make(self._posix, self._root, above)
        with directories.opened(self._posix, self._root, ()):
            # The root is there, or that line would have raised.
            raise OSError(errno.EAGAIN, "its directory was removed each time it was made")

    def _fill(
        self, file_fd: int, key: str, chunks: Iterable[Buffer], size_bytes: int | None
    ) -> None:
        """Write the chunks, make them durable, and close the file in any case."""
        try:
            writer = SequentialWriter(self._posix, file_fd)
            for chunk in chunks:
                view = as_bytes_view(chunk)
                if size_bytes is not None and writer.size_bytes + view.nbytes > size_bytes:
                    raise ValueError(f"{key}: chunks have more than the {size_bytes} bytes stated")
                writer.write(view)
            if size_bytes is not None and writer.size_bytes != size_bytes:
                raise ValueError(
                    f"{key}: chunks have {writer.size_bytes} bytes, expected {size_bytes}"
                )
            self._posix.fsync(file_fd)
        finally:
            self._posix.close(file_fd)

    def _link(self, key: str, temporary: str, name: str, directory_fd: int) -> None:
        try:
            self._posix.link(temporary, name, directory_fd)
        except FileExistsError as error:
            self._settle_taken(key, temporary, name, directory_fd, error)

    def _settle_taken(
        self, key: str, temporary: str, name: str, directory_fd: int, error: FileExistsError
    ) -> None:
        """Return if the name is taken by this very file; else raise what is in the way."""
        try:
            ours = self._posix.lstat(temporary, directory_fd)
            theirs = self._posix.lstat(name, directory_fd)
        except FileNotFoundError as gone:
            raise OSError(errno.EAGAIN, "it was taken, and is gone again") from gone
        if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
            return  # a network file system lost its answer, and asked again
        if stat.S_ISDIR(theirs.st_mode):
            raise self._errors.name_clash("put_if_absent", key) from error
        # Whoever linked it may not have made that durable yet. From here on callers may rely on it.
        with self._errors.typed("put_if_absent", key, Moment.AFTER):
            self._posix.fsync(directory_fd)
        raise self._errors.taken("put_if_absent", key) from error

    def delete(self, key: str) -> None:
        """See `Store.delete`. Then removes the directories above that are empty."""
        *above, name = check_key(key, operation="delete", where=self.url)
        segments = tuple(above)
        with suppress(NotFound), self._errors.typed("delete", key):
            with directories.opened(self._posix, self._root, segments) as fds:
                # IsADirectoryError: only keys below it exist. FileNotFoundError: go on, since an
                # earlier delete may not have been durable.
                with (
                    self._errors.typed("delete", key, Moment.PUBLISHING),
                    suppress(FileNotFoundError, IsADirectoryError),
                ):
                    self._posix.unlink(name, fds[-1])
                with self._errors.typed("delete", key, Moment.AFTER):
                    self._posix.fsync(fds[-1])
            directories.prune(self._posix, self._root, segments)

    # Reading.

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        with self._object("get", key) as (fd, size_bytes):
            if size_bytes > bytes_max:
                raise self._errors.too_large("get", key, size_bytes, bytes_max)
            return self._read("get", key, fd, 0, size_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        _check_range("get_range", key, offset, length)
        with self._object("get_range", key) as (fd, size_bytes):
            if offset + length > size_bytes:
                raise self._errors.truncated("get_range", key, offset, length, size_bytes)
            return self._read("get_range", key, fd, offset, length)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`. Straight into `target`, without a copy between."""
        view = as_bytes_view(target)
        if target.readonly:
            raise ValueError(f"read_into {key!r}: the target is read-only")
        length = view.nbytes
        _check_range("read_into", key, offset, length)
        with self._object("read_into", key) as (fd, size_bytes):
            if offset + length > size_bytes:
                raise self._errors.truncated("read_into", key, offset, length, size_bytes)
            done = 0
            while done < length:
                part = view[done : done + _READ_BYTES_MAX]
                read = self._posix.preadv(fd, [part], offset + done)
                if read == 0:
                    raise self._errors.truncated("read_into", key, offset, length, offset + done)
                done += read

    @property
    def is_local(self) -> bool:
        """Whether the root is on a file system of this machine: then `view` is cheap and safe."""
        return is_local(self._root)

    def view(self, key: str) -> memoryview:
        """The object's bytes where they are, in the page cache: not copied, not even read yet.

        Writable, but only for this process: the file never changes by it. Whoever must not be
        killed by a damaged disk makes its pages present first (`ckpt.mapping.populate`).
        Raises NotFound; Truncated for an empty object, which cannot be mapped.
        """
        with self._object("view", key) as (fd, size_bytes):
            if size_bytes == 0:
                raise self._errors.truncated("view", key, 0, 1, 0)
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            return memoryview(mmap.mmap(fd, size_bytes, flags=flags))

    def _read(self, operation: str, key: str, fd: int, offset: int, length: int) -> bytes:
        parts = []
        done = 0
        while done < length:
            part = self._posix.pread(fd, min(length - done, _READ_BYTES_MAX), offset + done)
            if not part:
                raise self._errors.truncated(operation, key, offset, length, offset + done)
            parts.append(part)
            done += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        *above, name = check_key(key, operation="stat", where=self.url)
        with (
            self._errors.typed("stat", key),
            directories.opened(self._posix, self._root, tuple(above)) as fds,
        ):
            status = self._posix.lstat(name, fds[-1])
            self._errors.check_regular("stat", key, status)
            return ObjectInfo(key, status.st_size, status.st_mtime)

    @contextmanager
    def opened(self, key: str) -> Iterator[tuple[int, int]]:
        """The object's descriptor and size in bytes, for sendfile; closed on exit.

        Raises as `get`.
        """
        with self._object("get", key) as found:
            yield found

    @contextmanager
    def _object(self, operation: str, key: str) -> Iterator[tuple[int, int]]:
        """The object's open descriptor and its size in bytes."""
        *above, name = check_key(key, operation=operation, where=self.url)
        with (
            self._errors.typed(operation, key),
            directories.opened(self._posix, self._root, tuple(above)) as fds,
        ):
            fd = self._posix.open_read(name, fds[-1])
            try:
                status = self._posix.fstat(fd)
                self._errors.check_regular(operation, key, status)
                yield fd, status.st_size
            finally:
                directories.close_read_only(self._posix, fd)

    # Looking around.

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        segments = check_prefix(prefix, operation="list", where=self.url)
        return self._listed(prefix, segments)

    def _listed(self, prefix: str, segments: tuple[str, ...]) -> Iterator[ObjectInfo]:
        with self._errors.typed("list", prefix):
            for above, name, status in directories.files(self._posix, self._root, segments):
                key = "/".join((*above, name))
                if is_key(key):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.leftovers`. A write that is still going on is among them."""
        segments = check_prefix(prefix, operation="leftovers", where=self.url)
        return self._left_over(prefix, segments)

    def _left_over(self, prefix: str, segments: tuple[str, ...]) -> Iterator[ObjectInfo]:
        with self._errors.typed("leftovers", prefix):
            for above, name, status in directories.files(self._posix, self._root, segments):
                temporary = _TEMPORARY.fullmatch(name)
                if temporary is not None:
                    key = "/".join((*above, temporary["name"]))
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    def sweep(self, leftover: ObjectInfo) -> None:
        """See `Store.sweep`. One that has grown since it was listed is being written: it stays."""
        key = leftover.key
        *above, wanted = check_key(key, operation="sweep", where=self.url)
        segments = tuple(above)
        with suppress(NotFound), self._errors.typed("sweep", key):
            with directories.opened(self._posix, self._root, segments) as fds:
                for name, status in self._posix.entries(fds[-1]):
                    temporary = _TEMPORARY.fullmatch(name)
                    found = (status.st_size, status.st_mtime)
                    if (
                        temporary is not None
                        and temporary["name"] == wanted
                        and found == (leftover.size_bytes, leftover.modified_s)
                    ):
                        with suppress(FileNotFoundError):
                            self._posix.unlink(name, fds[-1])
            directories.prune(self._posix, self._root, segments)


def _check_range(operation: str, key: str, offset: int, length: int) -> None:
    if offset < 0 or length < 0:
        raise ValueError(f"{operation} {key!r}: offset {offset}, length {length}: negative")

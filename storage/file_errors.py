"""What a `FileStore` says when something is in the way: one place for its sentences."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep.storage import directories
from keepstep.storage.errors import (
    AlreadyExists,
    BadKey,
    Denied,
    NotFound,
    Permanent,
    StoreError,
    TooLarge,
    Truncated,
)
from keepstep.storage.posix import Posix
from keepstep.storage.translate import Moment, translate

_WRITES = frozenset({"put", "put_stream", "put_if_absent"})
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class FileErrors:
    """Makes the errors of the store at `root`, whose URL is `where`."""

    def __init__(self, posix: Posix, root: str, where: str) -> None:
        self._posix = posix
        self._root = root
        self._where = where

    @contextmanager
    def typed(self, operation: str, key: str, moment: Moment = Moment.BEFORE) -> Iterator[None]:
        """Turns every OSError of the block into a StoreError."""
        try:
            yield
        except StoreError:
            raise  # NotFound and a few others are OSErrors as well
        except OSError as error:
            raise self._explained(error, operation, key, moment) from error

    def _explained(self, error: OSError, operation: str, key: str, moment: Moment) -> StoreError:
        if moment is Moment.AFTER:
            return translate(error, operation, key, self._where, moment)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return self._in_the_way(operation, key)
        if moment is Moment.PUBLISHING:
            if error.errno == errno.EISDIR:
                return self.name_clash(operation, key)
            if operation == "put_if_absent" and error.errno in _NO_HARD_LINKS:
                return self._no_hard_links(error, operation, key)
        elif error.errno == errno.ENOENT and not os.path.isdir(self._root):
            return self._make(
                Permanent,
                operation,
                key,
                "the store's directory is not there; mount it, or make it if the store is new",
                errno.ENOENT,
            )
        return translate(error, operation, key, self._where, moment)

    def _in_the_way(self, operation: str, key: str) -> StoreError:
        segments = tuple(key.rstrip("/").split("/"))
        link = directories.first_link(self._posix, self._root, segments)
        if link is not None:
            return self._make(
                Denied,
                operation,
                key,
                f"{'/'.join(link)!r} is a symbolic link, and a store follows none; put the files"
                " themselves there",
                errno.ELOOP,
            )
        if operation in _WRITES:
            return self.name_clash(operation, key)
        return self._make(NotFound, operation, key, "no such object", errno.ENOENT)

    def _no_hard_links(self, error: OSError, operation: str, key: str) -> StoreError:
        return self._make(
            Permanent,
            operation,
            key,
            f"{error.strerror}: this file system has no hard links, without which two writers"
            " cannot be kept apart; put the store on another one",
            error.errno,
        )

    def name_clash(self, operation: str, key: str) -> StoreError:
        """A name would have to be an object and a directory."""
        return self._make(
            BadKey,
            operation,
            key,
            "one name would have to be an object and the directory of others; choose another key",
            errno.ENOTDIR,
        )

    def taken(self, operation: str, key: str) -> StoreError:
        """put_if_absent came second."""
        return self._make(
            AlreadyExists,
            operation,
            key,
            "the key is taken; read it to see by whom",
            errno.EEXIST,
        )

    def too_large(self, operation: str, key: str, size_bytes: int, bytes_max: int) -> StoreError:
        """Larger than the caller can take."""
        return self._make(
            TooLarge, operation, key, f"{size_bytes} bytes, expected at most {bytes_max}", None
        )

    def truncated(
        self, operation: str, key: str, offset: int, length: int, size_bytes: int
    ) -> StoreError:
        """It ends too early."""
        return self._make(
            Truncated,
            operation,
            key,
            f"bytes {offset} to {offset + length} asked for, the object has {size_bytes}",
            None,
        )

    def check_regular(self, operation: str, key: str, status: os.stat_result) -> None:
        """Raises unless it is a plain file: NotFound for a directory, else Denied or Permanent."""
        if stat.S_ISDIR(status.st_mode):
            raise self._make(NotFound, operation, key, "no such object", errno.ENOENT)
        if stat.S_ISLNK(status.st_mode):
            raise self._in_the_way(operation, key)
        if not stat.S_ISREG(status.st_mode):
            raise self._make(
                Permanent, operation, key, "it is a device, pipe or socket, expected a file", None
            )

    def _make(
        self, kind: type[StoreError], operation: str, key: str, what: str, number: int | None
    ) -> StoreError:
        return kind(
            f"{operation} {key!r} in {self._where}: {what}",
            operation=operation,
            key=key,
            where=self._where,
            errno=number,
        )

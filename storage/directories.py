"""Walking down from a store's root, one directory at a time, never through a symbolic link.

Each step opens a name relative to the directory before it, so nothing that is swapped meanwhile can
lead out of the root.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from keepstep.storage.keys import is_segment
from keepstep.storage.posix import Posix


@contextmanager
def opened(posix: Posix, root: str, segments: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """Descriptors of the root and of each directory below it, closed on exit. Raises OSError."""
    fds: list[int] = []
    try:
        fds.append(posix.open_root(root))
        for segment in segments:
            fds.append(posix.open_dir(segment, fds[-1]))
        yield tuple(fds)
    finally:
        for fd in reversed(fds):
            close_read_only(posix, fd)


def close_read_only(posix: Posix, fd: int) -> None:
    """Close a descriptor through which nothing was written: a failure has nothing to tell."""
    with suppress(OSError):
        posix.close(fd)


def make(posix: Posix, root: str, segments: tuple[str, ...]) -> None:
    """Make the directories that are missing. Not durable.

    Raises OSError; FileNotFoundError also if somebody removes an empty one meanwhile.
    """
    for depth, segment in enumerate(segments):
        with opened(posix, root, segments[:depth]) as fds, suppress(FileExistsError):
            posix.mkdir(segment, fds[-1])


def prune(posix: Posix, root: str, segments: tuple[str, ...]) -> None:
    """Remove the directories of `segments` that are empty, from the deepest up.

    Stops at the first that cannot be removed, whatever the reason: an empty directory does no harm.
    """
    for depth in range(len(segments), 0, -1):
        try:
            with opened(posix, root, segments[: depth - 1]) as fds:
                posix.rmdir(segments[depth - 1], fds[-1])
        except OSError:
            return


def first_link(posix: Posix, root: str, segments: tuple[str, ...]) -> tuple[str, ...] | None:
    """The first part of the path that is a symbolic link: for the message when a walk failed."""
    for depth, segment in enumerate(segments):
        try:
            with opened(posix, root, segments[:depth]) as fds:
                if stat.S_ISLNK(posix.lstat(segment, fds[-1]).st_mode):
                    return segments[: depth + 1]
        except OSError:
            return None  # it has changed since; the message will do without
    return None


Entry = tuple[str, os.stat_result]


def files(
    posix: Posix, root: str, segments: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, os.stat_result]]:
    """Every regular file at or below `segments`: its directory, its name, what it is.

    In the order of the whole paths as strings. No descriptor is open while a caller looks at one.
    Links, special files, and directories that no key can name are passed over. Raises OSError.
    """
    waiting: list[tuple[tuple[str, ...], Entry]] = []

    def enter(directory: tuple[str, ...]) -> None:
        try:
            with opened(posix, root, directory) as fds:
                found = posix.entries(fds[-1])
        except (FileNotFoundError, NotADirectoryError):
            with opened(posix, root, ()):  # a root that is gone is no empty store: this raises
                return  # removed meanwhile; or the prefix names no directory
        found.sort(key=_path_order, reverse=True)
        waiting.extend((directory, entry) for entry in found)

    enter(segments)
    while waiting:
        directory, (name, status) = waiting.pop()
        if stat.S_ISDIR(status.st_mode) and is_segment(name):
            enter((*directory, name))
        elif stat.S_ISREG(status.st_mode):
            yield directory, name, status


def _path_order(entry: Entry) -> str:
    """A directory sorts as its name and "/", as it does within a whole path: a.b before a/b."""
    name, status = entry
    return name + "/" if stat.S_ISDIR(status.st_mode) else name

"""From what a person writes, a path or a URL, to a store."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from urllib.parse import unquote

from keepstep.storage.errors import NotFound, Permanent
from keepstep.storage.file import FileStore
from keepstep.storage.posix import Posix
from keepstep.storage.store import Store
from keepstep.storage.translate import translate

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_KNOWN = "a path, or file:///absolute/path"


def open_store(location: str | os.PathLike[str], create: bool = False) -> Store:
    """Open the store at `location`: a path, or ``file:///absolute/path``.

    Args:
        location: where.
        create: make the directory, durably, and those above it, if they are missing.

    Raises:
        NotFound: there is nothing, and `create` is false.
        Permanent: an unknown scheme, or something that is no directory stands there.
        StoreError: as the system's error says.
    """
    text = os.fspath(location)
    path = _path_of(text)
    if create:
        _make_root(path, text)
    if not os.path.isdir(path):
        if os.path.lexists(path):
            raise _refused(text, f"{path!r} is not a directory; a store is one", errno.ENOTDIR)
        raise NotFound(
            f"no store at {text!r}: there is no directory {path!r}; check the spelling, or let a"
            " training run make it",
            operation="open",
            where=text,
            errno=errno.ENOENT,
        )
    return FileStore(path)


def _path_of(text: str) -> str:
    if not text or "\0" in text:
        raise _refused(text, f"the location is empty or holds a zero byte; expected {_KNOWN}")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return os.path.abspath(os.path.expanduser(text))
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme == "memory":
        raise _refused(
            text,
            "a memory store lives inside one process, and cannot be opened by its address;"
            f" expected {_KNOWN}",
        )
    if scheme != "file":
        raise _refused(text, f"unknown kind of store {scheme!r}; expected {_KNOWN}")
    path = unquote(rest.removeprefix("localhost"))
    if not path.startswith("/") or "\0" in path:
        raise _refused(text, "a file URL has three slashes and an absolute path: file:///data/run")
    return os.path.abspath(path)


def _make_root(path: str, text: str) -> None:
    """Make `path` and what is missing above it; each new name is made durable in its parent."""
    made = []
    above = path
    while not os.path.lexists(above):
        made.append(above)
        above = os.path.dirname(above)
    try:
        os.makedirs(path, exist_ok=True)
        for child in reversed(made):
            _sync_directory(os.path.dirname(child))
        if not made:
            # Another process may have made it just now. Whoever may not open the parent did not.
            with suppress(PermissionError):
                _sync_directory(os.path.dirname(path))
    except (FileExistsError, NotADirectoryError) as error:
        raise _refused(text, f"{error.filename!r} is not a directory", error.errno) from error
    except OSError as error:
        raise translate(error, "open", path, text) from error


def _sync_directory(path: str) -> None:
    posix = Posix()
    fd = posix.open_root(path)
    try:
        posix.fsync(fd)
    finally:
        posix.close(fd)


def _refused(text: str, why: str, number: int | None = None) -> Permanent:
    return Permanent(
        f"cannot open the store {text!r}: {why}", operation="open", where=text, errno=number
    )

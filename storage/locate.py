"""From what a person writes, a path or a URL, to a store."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from contextlib import suppress
from urllib.parse import unquote

from keepstep.storage.errors import BadKey, MissingPackage, NotFound, Permanent
from keepstep.storage.file import FileStore
from keepstep.storage.keys import check_key
from keepstep.storage.posix import Posix
from keepstep.storage.store import Store
from keepstep.storage.translate import translate

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_KNOWN = "a path, file:///absolute/path, s3://bucket/prefix, or fsspec+NAME://..."
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_SINGLE_WRITER = "single_writer=true"


def open_store(location: str | os.PathLike[str], create: bool = False) -> Store:
    """Open the store at `location`.

    =============================  ==============================================================
    a path, ``file:///path``       a directory of a local or shared file system
    ``s3://bucket/prefix``         a bucket; endpoint and credentials are those of the environment
    ``fsspec+NAME://...``          whatever fsspec calls NAME; for one writer
    =============================  ==============================================================

    The last two take ``?single_writer=true``: on a store that cannot put-if-absent, do without.
    Their operations are tried again for a while when they fail in a way that may pass.

    Args:
        location: where.
        create: make the directory, durably, and those above it, or the mark of a store in a bucket,
            if they are missing. A bucket is never made.

    Raises:
        NotFound: there is nothing, and `create` is false.
        Permanent: an unknown scheme, something that is no directory stands there, or the package
            for this kind of store is missing.
        StoreError: as the system's or the server's error says.
    """
    text = os.fspath(location)
    match = _SCHEME.fullmatch(text)
    scheme = "" if match is None else match["scheme"].lower()
    if match is not None and scheme == "s3":
        return _open_s3(match["rest"], create)
    if match is not None and scheme.startswith("fsspec+"):
        return _open_fsspec(scheme.removeprefix("fsspec+"), match["rest"])
    return _open_directory(text, create)


def check_location(location: str | os.PathLike[str]) -> None:
    """Refuse, without looking at any store, what `open_store` could never open.

    Raises: Permanent: an unknown scheme, a malformed name, credentials in it, a missing package.
    """
    text = os.fspath(location)
    match = _SCHEME.fullmatch(text)
    scheme = "" if match is None else match["scheme"].lower()
    if match is not None and scheme == "s3":
        _s3_place(match["rest"])
        _check_package(text, "s3fs")
    elif match is not None and scheme.startswith("fsspec+"):
        _fsspec_place(scheme.removeprefix("fsspec+"), match["rest"])
        _check_package(text, "fsspec")
    else:
        _path_of(text)


def directory_of(location: str | os.PathLike[str]) -> str | None:
    """The absolute path of the directory that a location names; None for another kind of store.

    Raises: Permanent, as `check_location`.
    """
    text = os.fspath(location)
    match = _SCHEME.fullmatch(text)
    scheme = "" if match is None else match["scheme"].lower()
    if scheme == "s3" or scheme.startswith("fsspec+"):
        return None
    return _path_of(text)


def _check_package(text: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise _missing(text, ImportError(f"no module named {package!r}"))


def _open_directory(text: str, create: bool) -> Store:
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


def _s3_place(rest: str) -> tuple[str, str, bool]:
    """Bucket, prefix, and whether there is one writer only.

    `rest` is what follows the scheme: bucket/prefix?single_writer=true.
    """
    place, _, query = rest.partition("?")
    bucket, _, prefix = place.partition("/")
    prefix = prefix.rstrip("/")
    if "@" in place:
        raise _refused(
            "s3://...",
            "it holds credentials, which other users and logs would see; give them by"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by a profile in ~/.aws",
        )
    text = f"s3://{rest}"
    if _BUCKET.fullmatch(bucket) is None:
        raise _refused(text, f"{bucket!r} is no name of a bucket; expected s3://bucket/prefix")
    try:
        if prefix:
            check_key(prefix)
    except BadKey as error:
        raise _refused(text, str(error)) from error
    return bucket, prefix, _is_single_writer(text, query)


def _open_s3(rest: str, create: bool) -> Store:
    bucket, prefix, single_writer = _s3_place(rest)
    text = f"s3://{rest}"
    try:
        from keepstep.storage.s3 import S3Store
        from keepstep.storage.s3_client import S3Client
    except ImportError as error:
        raise _missing(text, error) from error
    inner = S3Store(S3Client(bucket), prefix, single_writer=single_writer)
    store = _patient(inner)
    if create:
        _ = store.capabilities  # leaves the mark
    elif not inner.exists():
        raise NotFound(
            f"no store at {text!r}: there is nothing under this prefix; check the spelling, or let"
            " a training run make it",
            operation="open",
            where=text,
        )
    return store


def _fsspec_place(name: str, rest: str) -> tuple[str, bool]:
    """fsspec's own URL, and whether there is one writer only."""
    place, _, query = rest.partition("?")
    text = f"fsspec+{name}://{rest}"
    if "@" in place:
        raise _refused(f"fsspec+{name}://...", "it holds credentials, which others would see")
    single_writer = _is_single_writer(text, query)
    if name == "memory":
        raise _refused(text, "a memory store lives inside one process")
    return f"{name}://{place}", single_writer


def _open_fsspec(name: str, rest: str) -> Store:
    url, single_writer = _fsspec_place(name, rest)
    text = f"fsspec+{name}://{rest}"
    try:
        from fsspec.core import url_to_fs

        from keepstep.storage.object import FsspecStore

        file_system, root = url_to_fs(url)
    except ImportError as error:
        raise _missing(text, error) from error
    except ValueError as error:
        raise _refused(text, f"fsspec: {error}") from error
    return _patient(FsspecStore(file_system, root, url=text, single_writer=single_writer))


def _patient(inner: Store) -> Store:
    """Images, manifests and hints have one writer each, so their puts may be repeated."""
    from keepstep.storage.retry import REPEATABLE, RetryingStore, RetryPolicy

    return RetryingStore(inner, RetryPolicy(), repeats_unknown=REPEATABLE)


def _is_single_writer(text: str, query: str) -> bool:
    if query not in ("", _SINGLE_WRITER):
        raise _refused(text, f"unknown option {query!r}; the only one is {_SINGLE_WRITER}")
    return bool(query)


def _missing(text: str, error: ImportError) -> MissingPackage:
    return MissingPackage(
        f"cannot open the store {text!r}: this kind of store needs a package that is missing "
        f"({error}): pip install 'keepstep[s3]'",
        operation="open",
        where=text,
    )


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

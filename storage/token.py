"""The job's token: who may ask a keeper for anything.

It is a secret of one job, in the environment as KEEPSTEP_TOKEN or in a file of mode 0600. It never
stands on a command line, in a log, in a message or in a store; `repr` does not show it.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping

from keepstep.storage.errors import Denied, StoreError
from keepstep.storage.translate import translate

TOKEN_VARIABLE = "KEEPSTEP_TOKEN"

_SCHEME = "Bearer "
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_FILE_BYTES_MAX = 1 << 10
_RANDOM_BYTES = 32
_ADVICE = "expected 16 to 512 letters, digits and . _ ~ + / = -"


class Token:
    """A token, which shows itself to nobody but the other side of a connection."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        """Raises Denied, without showing it, for a text that is no token."""
        if _TOKEN.fullmatch(text) is None:
            raise _refused(f"a token of {len(text)} characters is malformed; {_ADVICE}")
        self._text = text

    @property
    def header(self) -> str:
        """The value of the Authorization header of a request."""
        return _SCHEME + self._text

    @property
    def text(self) -> str:
        """The token itself: for the environment of a child process only."""
        return self._text

    def admits(self, header: str | None) -> bool:
        """Whether a request with this Authorization header may pass. Takes the same time for all.

        That is, for all of one length: the token's length is no secret.
        """
        given = (header or "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self.header.encode())

    def __repr__(self) -> str:
        return "Token(...)"


def new_token() -> Token:
    """A token that nobody has guessed."""
    return Token(secrets.token_urlsafe(_RANDOM_BYTES))


def find_token(environment: Mapping[str, str], file: str | os.PathLike[str] | None) -> Token:
    """The job's token: that of the environment, else that in `file`.

    Raises:
        Denied: there is none, it is malformed, or others than its owner may read the file.
        StoreError: the file cannot be read.
    """
    text = environment.get(TOKEN_VARIABLE)
    if text:
        return Token(text)
    if file is None:
        raise _refused(
            f"there is no job token; set {TOKEN_VARIABLE}, or name a file of mode 0600 that has it"
        )
    return read_token(file)


def read_token(file: str | os.PathLike[str]) -> Token:
    """The token in `file`, which must be a file of this user's that nobody else may touch.

    Raises:
        NotFound: there is no such file.
        Denied: a link, another owner's, of another mode than 0600 or 0400, or malformed.
        StoreError: as the system's error says.
    """
    path = os.fspath(file)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _file_error(error, path) from error
    try:
        status = os.fstat(fd)
        _check_private(path, status)
        data = os.read(fd, _FILE_BYTES_MAX + 1)
    except StoreError:
        raise
    except OSError as error:
        raise _file_error(error, path) from error
    finally:
        os.close(fd)
    if len(data) > _FILE_BYTES_MAX:
        raise _refused(f"the token file {path!r} has over {_FILE_BYTES_MAX} bytes", path)
    try:
        return Token(data.decode("ascii").strip())
    except (UnicodeDecodeError, Denied) as error:
        raise _refused(f"the token file {path!r} holds no token; {_ADVICE}", path) from error


def make_token_file(file: str | os.PathLike[str]) -> Token:
    """The token in `file`; a new one is written there first, with mode 0600, if there is no file.

    Two processes that make it at once get the same token. Raises as `read_token`.
    """
    path = os.fspath(file)
    temporary = f"{path}.{secrets.token_hex(8)}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as out:
                out.write(new_token().text.encode() + b"\n")
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            pass  # somebody was first: theirs is the token
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise _file_error(error, path) from error
    return read_token(path)


def _check_private(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refused(f"the token file {path!r} is not a regular file", path)
    if status.st_uid != os.geteuid():
        raise _refused(
            f"the token file {path!r} belongs to user {status.st_uid}, expected"
            f" {os.geteuid()}; make your own",
            path,
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o177:
        raise _refused(
            f"the token file {path!r} has mode {mode:04o}, expected 0600: others may have read it;"
            " delete it, and let a new one be made",
            path,
        )


def _file_error(error: OSError, path: str) -> StoreError:
    return translate(error, "token", path, path)


def _refused(message: str, path: str = "") -> Denied:
    return Denied(message, operation="token", key=path, where=path)

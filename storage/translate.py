"""From the operating system's error numbers to the store's typed errors.

Two things decide: the number, and the moment. Before the one call that changes what readers see, a
failure is certain: nothing happened. In that call, only numbers with which the system says "I did
not do it" are certain. After it every failure is OutcomeUnknown.
"""

from __future__ import annotations

import errno
from enum import Enum, auto

from keepstep.storage.errors import (
    Denied,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    Permanent,
    StoreError,
    Transient,
)

_NO_SPACE = frozenset(
    # EFBIG: a limit on file size, set for the process or by the file system, is a quota too.
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
)
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_TRANSIENT = frozenset(
    {
        # This machine is short of something for now.
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENOLCK,
        # A network file system's server is away, or has forgotten a handle (looked up anew).
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_REFUSED = frozenset(
    # The system looked at the request and turned it down: certain, even for a rename or a link.
    # Not ENOENT: a network file system that sends a lost rename again gets it after a success.
    {
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.EMLINK,
        errno.ENAMETOOLONG,
        errno.ENOSYS,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EOPNOTSUPP,
        errno.EXDEV,
    }
)
_LOCAL_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_ADVICE = {
    NoSpace: "free space or raise the quota",
    Denied: "check the owner, the mode and the mount options",
    Transient: "try again",
    OutcomeUnknown: "read the key to learn whether it happened",
    NotFound: "list the store to see what is there",
    Permanent: "see the system's log; the same call will fail again",
}


class Moment(Enum):
    """Where an operation was when a call failed."""

    BEFORE = auto()
    """Readers could not have seen anything of it."""
    PUBLISHING = auto()
    """In the rename, link or unlink that readers see."""
    AFTER = auto()
    """Readers see it, but it may not survive a power loss."""


def translate(
    error: OSError, operation: str, key: str, where: str, moment: Moment = Moment.BEFORE
) -> StoreError:
    """The typed error for `error`, its number kept.

    Args:
        error: what the system raised.
        operation: "put", "get", ...
        key: the key, or prefix, it was tried on.
        where: the store's URL.
        moment: where the operation was.
    """
    number = error.errno or 0
    kind = _kind(number, moment)
    reason = error.strerror or str(error)
    return kind(
        f"{operation} {key!r} in {where}: {reason}"
        f" ({errno.errorcode.get(number, 'no error number')}); {_ADVICE[kind]}",
        operation=operation,
        key=key,
        where=where,
        errno=error.errno,
    )


def _kind(number: int, moment: Moment) -> type[StoreError]:
    if moment is Moment.AFTER:
        return OutcomeUnknown
    certain = _NO_SPACE | _DENIED | _REFUSED | _LOCAL_SHORTAGE
    if moment is Moment.PUBLISHING and number not in certain:
        return OutcomeUnknown
    if number in _NO_SPACE:
        return NoSpace
    if number in _DENIED:
        return Denied
    if number in _TRANSIENT:
        return Transient
    if number == errno.ENOENT:
        return NotFound
    return Permanent

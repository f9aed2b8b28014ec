"""What can go wrong with a store, on two axes: can it be retried, and is the outcome known.

    StoreError                      base; never raised itself
    ├── Transient                   nothing happened, the same call may succeed later
    │   └── Throttled               the store asks for fewer requests: wait longer
    ├── OutcomeUnknown              the operation may or may not have happened: read, then decide
    └── Permanent                   the same call will fail again until somebody acts
        ├── NotFound                no such key (also a FileNotFoundError)
        ├── AlreadyExists           put_if_absent found the key taken (also a FileExistsError)
        ├── Truncated               the object ends before the bytes that were asked for
        ├── TooLarge                the object is larger than the caller's bound
        ├── BadKey                  a key that could leave the store's directory, or is malformed
        ├── MissingPackage          this kind of store needs a package that is not installed
        ├── NoSpace                 disk full or over quota (errno kept)
        └── Denied                  permission, read-only file system, refused credentials

A caller writes::

    try:
        store.put(key, data)
    except Transient: ...           # retry
    except OutcomeUnknown: ...      # read back, then decide
    except Permanent as error: ...  # tell a person; error.errno says what the system said
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all store errors.

    Attributes:
        operation: what was tried ("put", "get", ...).
        key: the key it was tried on.
        where: the store's URL.
        errno: the operating system's number, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        key: str = "",
        where: str = "",
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.key = key
        self.where = where
        self.errno = errno


class Transient(StoreError):
    """Nothing happened; the same call may succeed later."""


class Throttled(Transient):
    """Nothing happened: the store asks for fewer requests. Wait longer than for another error."""


class OutcomeUnknown(StoreError):
    """The operation may or may not have happened. Read before trying again."""


class Permanent(StoreError):
    """The same call will fail again until somebody acts."""


class MissingPackage(Permanent):
    """This kind of store needs a package that is not installed."""


class NotFound(Permanent, FileNotFoundError):
    """No such key."""


class AlreadyExists(Permanent, FileExistsError):
    """`put_if_absent` found the key taken."""


class Truncated(Permanent):
    """The object ends before the bytes that were asked for."""


class TooLarge(Permanent):
    """The object is larger than the bound that the caller gave."""


class BadKey(Permanent, ValueError):
    """A malformed key, or one that would leave the store's directory."""


class NoSpace(Permanent):
    """Disk full or over quota. Nothing that was good before has changed."""


class Denied(Permanent, PermissionError):
    """Permission missing, read-only file system, or refused credentials."""

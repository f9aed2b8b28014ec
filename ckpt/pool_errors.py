"""What can go wrong with a host's shared memory. Pure.

PoolError                       base; a CheckpointError
├── PoolTooLarge                memory does not suffice; both numbers (also a MemoryError)
├── PoolDamaged                 the file is not a pool, or its table makes no sense
├── PoolFull                    all rows of the table are in use
├── WrongStatus                 a slot is not in the status that the call needs
├── HostDirDamaged              what an earlier keeper left cannot be used
├── HostDirFull                 no room for it
└── HostDirRefused              a directory that is not safely ours, or a name that cannot be used
"""

from __future__ import annotations

from keepstep.ckpt.errors import CheckpointError


class PoolError(CheckpointError):
    """Base of what pools and host directories raise."""


class PoolTooLarge(PoolError, MemoryError):
    """Memory does not suffice. Nothing was allocated; nothing that was there has changed.

    Attributes:
        needed_bytes: what was asked for.
        available_bytes: what there is, by the tightest limit.
    """

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class PoolDamaged(PoolError):
    """The file is not a pool of this version, or its table makes no sense."""


class PoolFull(PoolError):
    """All rows of the table are in use."""


class WrongStatus(PoolError):
    """A slot is not in the status that the call needs: two processes think they own it."""


class HostDirDamaged(PoolError):
    """What an earlier keeper left in a host directory cannot be used; says how to free it."""


class HostDirFull(PoolError):
    """A host directory's file system has no room for it; says what to do."""


class HostDirRefused(PoolError):
    """A directory that is not safely ours, or whose name cannot be used; says what to do."""

"""What can go wrong between ranks, keepers and their host's memory. Pure.

KeeperError                     base; a CheckpointError
├── Stale                       asked for, or by, an older generation or term: stop
├── KeeperGone                  nobody answers on the control socket (any more)
├── KeeperRunning               another keeper holds the host directory; names its pid
├── SlotsTaken                  a living process still writes there; names its pid
├── NoRoom                      no slot that may be written is left for a peer's image
└── Refusal                     the request makes no sense here; the message says why
"""

from __future__ import annotations

from keepstep.ckpt.errors import CheckpointError


class KeeperError(CheckpointError):
    """Base of what keepers and their clients raise."""


class Stale(KeeperError):
    """An older generation or term than the keeper promised to. Whoever gets this is superseded.

    Attributes:
        generation: what the keeper promised.
        term: likewise.
    """

    def __init__(self, message: str, *, generation: int = -1, term: int = -1) -> None:
        super().__init__(message)
        self.generation = generation
        self.term = term


class KeeperGone(KeeperError):
    """The keeper of this host does not answer: not started, dead, or stopped."""


class KeeperRunning(KeeperError):
    """Another keeper is alive in the host directory.

    Attributes:
        pid: its process id; 0 if it could not be read.
    """

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class SlotsTaken(KeeperError):
    """A living process of an older generation still owns what was asked for.

    Attributes:
        pid: that process.
    """

    def __init__(self, message: str, *, pid: int = 0) -> None:
        super().__init__(message)
        self.pid = pid


class NoRoom(KeeperError):
    """No slot is left that a peer's image may be written to now. Try again with a later state."""


class Refusal(KeeperError):
    """A request that this keeper cannot serve: another job's, out of order, or not understood."""


KINDS: dict[str, type[KeeperError]] = {
    kind.__name__: kind for kind in (Stale, SlotsTaken, NoRoom, Refusal)
}
"""Errors that travel between processes by name, and are made from a message alone."""

"""The sending side of replication: offers each newly sealed own image to this host's peers."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.storage.token import Token


class Replicator:
    """A `Service`. One thread for each peer host.

    Args:
        config: job, host and patience are used.
        shelf: which holds what is being sent.
        reporter: `acked`, and the events `unprotected` and `protected`.
        token: the job's.
        address: "host:port" of this host's data plane, from which peers pull.
        agreed: rank -> the newest step that is sealed and acked on all ranks (its seat's word), -1:
            none yet.
        locate: host id -> where its keeper may be now ("host:port" or None), asked when it is not
            where the tenure says: a hint.
    """

    def __init__(
        self,
        config: KeeperConfig,
        shelf: Shelf,
        reporter: Reporter,
        token: Token,
        address: str,
        agreed: Callable[[int], int],
        locate: Callable[[str], str | None],
    ) -> None:
        raise NotImplementedError

    def enter(self, tenure: Tenure) -> None:
        """See `Service.enter`."""

    def sealed(self, shelved: Shelved) -> None:
        """See `Service.sealed`."""

    def close(self, timeout_s: float) -> None:
        """See `Service.close`."""

    def status(self) -> dict[str, object]:
        """See `Service.status`."""
        raise NotImplementedError

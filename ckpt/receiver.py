"""The receiving side of replication: takes an offer, pulls the image into a slot, verifies it."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.service import PeerSlots, Reporter
from keepstep.ckpt.shelf import Shelf
from keepstep.storage.token import Token


class Receiver:
    """Takes offers of other keepers. Several threads may call it.

    Args:
        config: job, host and patience are used.
        slots: where images go.
        check_fence: raises Stale for an older (generation, term) than was promised.
        shelf: what this host has already.
        reporter: for events.
        token: for the pull from the sender.
    """

    def __init__(
        self,
        config: KeeperConfig,
        slots: PeerSlots,
        check_fence: Callable[[int, int], None],
        shelf: Shelf,
        reporter: Reporter,
        token: Token,
    ) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections that lie idle; later offers are refused."""

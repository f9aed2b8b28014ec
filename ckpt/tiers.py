"""Where copies of an image may be, and when one is due there. Pure.

A copy is worth what survives with it: `MEMORY` dies with the host, `PEER` with another host, `DISK`
with this host's disk, `STORE` with nothing that one job can lose.
"""

from __future__ import annotations

from enum import Enum, IntFlag

import msgspec


class Tier(Enum):
    """A kind of place, nearest first."""

    MEMORY = "memory"
    """This host's pool: an image of one of its own ranks."""
    PEER = "peer"
    """This host's pool: an image that another host's keeper sent."""
    DISK = "disk"
    STORE = "store"


class Due(IntFlag):
    """The tiers, beyond memory and peers, that a captured state goes to."""

    NOWHERE = 0
    DISK = 1
    STORE = 2


class TierPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a state goes to a tier, and how many stay there.

    Attributes:
        every_steps: at steps that are multiples of this; 0: not by steps.
        every_s: when so many seconds have gone by since the last; 0: not by time.
        keep: the newest so many stay; 0: all.
        keep_every: and every one whose step is a multiple of this; 0: none besides.
    """

    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 0
    keep_every: int = 0

    def is_due(self, step: int, since_s: float) -> bool:
        """Whether the state after `step` goes there, `since_s` after the last that did."""
        by_steps = self.every_steps > 0 and step % self.every_steps == 0
        return by_steps or 0.0 < self.every_s <= since_s


class Tiers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole policy.

    Attributes:
        capture_every: steps between captures into memory; 1: every step; 0: only what is due below.
        peers: copies in the memory of other hosts.
        disk: of each host, for its own ranks' images.
        store: for all; a commit is made when all images of a state are there.
    """

    capture_every: int = 1
    peers: int = 1
    disk: TierPolicy = TierPolicy(keep=2)
    store: TierPolicy = TierPolicy(keep=5)

    def due(self, step: int, since_disk_s: float, since_store_s: float) -> Due:
        """Where the state after `step` goes beyond memory and peers."""
        due = Due.NOWHERE
        if self.disk.is_due(step, since_disk_s):
            due |= Due.DISK
        if self.store.is_due(step, since_store_s):
            due |= Due.STORE
        return due

    def is_captured(self, step: int, due: Due) -> bool:
        """Whether the state after `step` is captured at all."""
        return bool(due) or (self.capture_every > 0 and step % self.capture_every == 0)

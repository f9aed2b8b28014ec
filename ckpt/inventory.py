"""What a keeper says it has: plain data, sent between hosts.

An answer to `TakeInventory` is a promise (DESIGN section 5): from then on the keeper refuses what
is older than the generation and term it was asked for, and pins the newest two states that it
listed until that generation's first sealed step.
"""

from __future__ import annotations

import msgspec

from keepstep.ckpt.manifest import ImageRecord, State
from keepstep.ckpt.tiers import Tier


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sealed and verified image on one host.

    Attributes:
        state: whose image it is.
        record: rank, sizes and digest, as a manifest has them.
        tier: MEMORY, PEER or DISK.
        plan_digest: of the structure that it is part of.
    """

    state: State
    record: ImageRecord
    tier: Tier
    plan_digest: str


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one host has.

    Attributes:
        host: its id.
        rack: the failure domain above it; "" if none was given.
        address: "host:port" of its keeper's data plane.
        generation: below which its keeper refuses everything.
        term: likewise.
        copies: all of them.
    """

    host: str
    rack: str
    address: str
    generation: int
    term: int
    copies: tuple[Copy, ...]


class HostAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host of a generation, and where its keeper listens."""

    host: str
    rack: str
    address: str

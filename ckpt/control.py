"""What ranks and their host's keeper say to each other over a Unix socket: pure messages.

Only at a run's beginning and end; while it steps they meet in the pool's table alone. One frame is
a length of 4 bytes, big-endian, and as many bytes of JSON. A request has exactly one reply.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from keepstep.ckpt.inventory import HostAddress, Inventory
from keepstep.ckpt.manifest import State
from keepstep.ckpt.structure import Structure

FRAME_BYTES_MAX = 1 << 26
"""Room for a structure of 5 x 10^5 tensors."""


class Attach(msgspec.Struct, frozen=True, tag="attach", forbid_unknown_fields=True):
    """The first request of a connection: who is asking. `ticks` is the start time of `pid`."""

    job: str
    rank: int
    pid: int
    ticks: int


class Attached(msgspec.Struct, frozen=True, tag="attached", forbid_unknown_fields=True):
    """Which keeper answers, and below which generation and term it refuses everything."""

    host: str
    rack: str
    address: str
    pid: int
    generation: int
    term: int


class TakeInventory(msgspec.Struct, frozen=True, tag="take_inventory", forbid_unknown_fields=True):
    """Ask for the inventory, for this generation and term. Answered with an `Inventory`."""

    generation: int
    term: int


class Taken(msgspec.Struct, frozen=True, tag="taken", forbid_unknown_fields=True):
    """The inventory, promised."""

    inventory: Inventory


class Describe(msgspec.Struct, frozen=True, tag="describe", forbid_unknown_fields=True):
    """Ask for the description (structure and values) of a state in the inventory."""

    state: State


class Described(msgspec.Struct, frozen=True, tag="described", forbid_unknown_fields=True):
    """The description as `encode_description` makes it."""

    data: bytes


class Enter(msgspec.Struct, frozen=True, tag="enter", forbid_unknown_fields=True):
    """A rank enters a generation, whose entry is in the log. Blocking: memory is made and touched.

    Attributes:
        generation: its number.
        term: under which commits are to be appended.
        rank: who enters.
        ranks: all ranks that this host has in the generation.
        hosts: of all ranks, by rank: index into `addresses`.
        addresses: the generation's hosts, in the order of its log entry.
        committer: index into `addresses` of the host whose keeper commits.
        base: the state it begins from.
        structure: of all ranks.
        header: the rank's unsealed image header, for step 0; b"" if the rank owns nothing.
        image_bytes_max: the largest image that this rank may get under any allowed layout.
    """

    generation: int
    term: int
    rank: int
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    addresses: tuple[HostAddress, ...]
    committer: int
    base: State | None
    structure: Structure
    header: bytes
    image_bytes_max: int


class Entered(msgspec.Struct, frozen=True, tag="entered", forbid_unknown_fields=True):
    """The pool's path, the rank's seat in its table, and its slots (three, or two, or none)."""

    pool: str
    seat: int
    slots: tuple[int, ...]


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """A rank goes. `is_finished`: the run ended well, so that memory need not outlive it."""

    is_finished: bool


class Left(msgspec.Struct, frozen=True, tag="left", forbid_unknown_fields=True):
    """The keeper knows."""


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Nothing was done. `kind`: an error of `ckpt.errors`; `message`: what it says."""

    kind: str
    message: str


Request: TypeAlias = Attach | TakeInventory | Describe | Enter | Leave
Reply: TypeAlias = Attached | Taken | Described | Entered | Left | Refused

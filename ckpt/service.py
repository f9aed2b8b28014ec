"""What the parts of a keeper process promise each other.

The core seals images and puts them on the shelf. Services (drains, replicator) take them from there
to other places, in threads of their own, and report. All methods here may be called from any
thread, and none of them blocks on a store, a disk or a peer, unless it says so.
"""

from __future__ import annotations

from typing import Protocol

from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.manifest import ImageRecord, State
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tenure import Tenure


class Reporter(Protocol):
    """Where services report. Implemented by the core; steps never go back within a generation."""

    def acked(self, rank: int, step: int) -> None:
        """All that should hold a copy of own `rank`'s images up to `step` do (cumulative)."""

    def drained(self, rank: int, step: int) -> None:
        """No due image of own `rank` up to `step` needs its slot any more."""

    def committed(self, state: State) -> None:
        """The log has a commit of `state`."""

    def superseded(self, generation: int) -> None:
        """A newer run has taken over the log: ranks of `generation` are to end."""

    def event(self, kind: str, reason: str, **details: object) -> None:
        """Something worth a line in the event log."""

    def failed(self, rank: int) -> None:
        """Count a failure (told as an event) in `rank`'s seat, for its metrics."""


class Service(Protocol):
    """A part of the keeper that works on sealed images."""

    def enter(self, tenure: Tenure) -> None:
        """A generation begins here, or goes on after the keeper was started anew.

        On return nothing is reported any more for an older one, and images of older ones that are
        void are held no more. Called with the core's lock held: it must not wait for anything.
        """

    def sealed(self, shelved: Shelved) -> None:
        """An own image was sealed, or (after the first `enter`) adopted; by step for each rank.

        Images of older generations than the tenure's come only when they were adopted.
        """

    def close(self, timeout_s: float) -> None:
        """Finish what is due, for at most `timeout_s` (blocking), then stop all threads."""

    def status(self) -> dict[str, object]:
        """JSON for the status page: lag, queues, failures."""


class Answers(Protocol):
    """What the data plane asks of the core (a `data_plane.Served`, with what `PeerSlots` has)."""

    def inventory(self) -> Inventory:
        """What this host has. No promise."""

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """The same as a promise, persisted on return. Raises Stale. Blocking: one fsync."""

    def describe(self, state: State) -> bytes:
        """`encode_description` of a state in the inventory. Raises NoSuchState."""

    def check_fence(self, generation: int, term: int) -> None:
        """Raise Stale if a newer generation was promised, or a newer term of the same."""

    def status(self) -> dict[str, object]:
        """JSON for the status page, with that of all services."""


class PeerSlots(Protocol):
    """Memory for images that other hosts' keepers send: the receiving side of the replicator."""

    def structure(self, digest: str) -> Structure | None:
        """The structure with this digest, if this host knows it."""

    def keep_structure(self, structure: Structure) -> None:
        """Remember a structure, for as long as the host directory lives. Blocking: one write."""

    def take(
        self,
        generation: int,
        term: int,
        state: State,
        rank: int,
        size_bytes: int,
        agreed_acked: int,
    ) -> Slot:
        """A slot, FILLING with this keeper as its writer, for the image of a remote `rank`.

        Blocking: it may have to make and touch memory.

        Args:
            generation: the sender's.
            term: the sender's.
            state: of the image.
            rank: whose it is.
            size_bytes: of the whole image.
            agreed_acked: the sender's: older images of this rank and generation may go.

        Raises:
            Stale: the sender is of an older generation or term than was promised.
            NoRoom: all slots of that rank are in use for what may not go yet.
        """

    def keep(
        self,
        slot: Slot,
        header: ImageHeader,
        record: ImageRecord,
        values: bytes,
        structure: Structure,
    ) -> Shelved:
        """The slot holds the whole, verified image: seal it, and put it on the shelf.

        Raises Stale, and frees the slot, if a newer generation was promised meanwhile.
        """

    def drop(self, slot: Slot) -> None:
        """The transfer failed: free the slot."""

"""What a keeper answers over the network: a thread with its own loop. No torch, no slowness shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.manifest import State
from keepstep.ckpt.structure import Structure
from keepstep.storage.store import Store
from keepstep.storage.token import Token


class Served(Protocol):
    """The keeper's core, as the data plane asks it. Called from the data plane's threads."""

    def inventory(self) -> Inventory:
        """What is there now. No promise."""

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """The inventory, promised. Raises `Stale` for an older generation or term."""

    def describe(self, state: State) -> bytes:
        """`encode_description` of a state in the inventory. Raises NoSuchState."""

    def structure(self, digest: str) -> Structure | None:
        """The structure with this plan digest, if this host knows it."""

    def keep_structure(self, structure: Structure) -> None:
        """Know it from now on (`structure-<digest>.json` in the host directory)."""

    def check_fence(self, generation: int, term: int) -> None:
        """Raise `Stale` if this keeper has promised a newer generation, or term of the same."""

    def status(self) -> dict[str, Any]:
        """For people: lag per tier, services, promises."""


class DataPlane:
    """The server. `start` binds and returns "host:port"; `close` ends it, its thread and sockets.

    Args:
        host: this host's id; offers meant for another are refused.
        bind: address to listen on; `port`: 0 for any.
        token: the job's.
        served: the core.
        stores: "memory" and, with a disk tier, "disk": readable by peers, never writable.
        receiver: takes peers' offers.
        timeout_s: how long a peer may be silent.
    """

    def __init__(
        self,
        host: str,
        bind: str,
        port: int,
        token: Token,
        served: Served,
        stores: Mapping[str, Store],
        timeout_s: float,
    ) -> None:
        raise NotImplementedError

    def start(self) -> str:
        """Listen. Returns "host:port". Raises OSError."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is going on, close all sockets, join the thread. Blocking, bounded."""

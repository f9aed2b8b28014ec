"""Where copies of images are read from: a host's pool and disk, its peers', the store.

Each is a `Store` that has images under their usual keys. Of the first two, and of a store in a
local directory, the bytes can be used where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from keepstep.ckpt.candidates import Place
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.mosaic import Distance, nearest
from keepstep.ckpt.plain_view import plain_view
from keepstep.ckpt.tiers import Tier
from keepstep.storage.file import FileStore
from keepstep.storage.peer import PeerStore
from keepstep.storage.store import Store
from keepstep.storage.token import Token

MEMORY, DISK = "memory", "disk"
"""What a keeper's data plane calls its two stores."""


@runtime_checkable
class Viewable(Protocol):
    """A store whose objects can be looked at in place."""

    def view(self, key: str) -> memoryview:
        """All bytes of an object where they are. Raises as `Store.get`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A place, and the store through which it is read."""

    place: Place
    store: Store
    is_in_place: bool

    def view(self, key: str) -> memoryview:
        """The object where it lies. Only if `is_in_place`. Raises as the store does."""
        assert isinstance(self.store, Viewable)
        return self.store.view(key)


def origin_of(place: Place, store: Store) -> Origin:
    """The origin that a store is; in place if its bytes can safely be mapped here."""
    if isinstance(store, FileStore):
        return Origin(place, store, store.is_local)
    return Origin(place, store, isinstance(store, Viewable))


class Sources:
    """Everything that one rank can read from. Opens connections as they are needed.

    Args:
        here: this host, and the racks of all.
        store: the durable store; None: not to be asked.
        pool: this host's memory; None if it has none.
        disk_dir: root of this host's disk tier, if it has one.
        addresses: host -> "host:port" of its keeper's data plane, of the hosts that can be asked.
        token: the job's; None: other hosts cannot be asked.
        timeout_s: how long a peer may be silent.
    """

    def __init__(
        self,
        here: Distance,
        *,
        store: Store | None,
        pool: Store | None = None,
        disk_dir: Path | None = None,
        addresses: Mapping[str, str] | None = None,
        token: Token | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._here = here
        self._store = store
        self._plain = store
        self._pool = pool
        self._disk = FileStore(disk_dir) if disk_dir is not None and disk_dir.is_dir() else None
        self._addresses = dict(addresses or {})
        self._token = token
        self._timeout_s = timeout_s
        self._peers: dict[tuple[str, str], PeerStore] = {}

    def see(self, manifest: Manifest) -> None:
        """From now on, read the images of `manifest` from the store as they are encoded there."""
        if self._store is not None:
            self._plain = plain_view(self._store, manifest)

    def origins(self, places: Iterable[Place], turn: int) -> tuple[Origin, ...]:
        """Those of `places` that this rank can reach, nearest first; equals rotated by `turn`."""
        found = []
        for place in nearest(places, self._here, turn):
            store = self._open(place)
            if store is not None:
                found.append(origin_of(place, store))
        return tuple(found)

    def close(self) -> None:
        """Close the connections to peers."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, place: Place) -> Store | None:
        if place.tier is Tier.STORE:
            return self._plain
        is_memory = place.tier in (Tier.MEMORY, Tier.PEER)
        if place.host == self._here.host:
            return self._pool if is_memory else self._disk
        address = self._addresses.get(place.host)
        if address is None or self._token is None:
            return None
        name = MEMORY if is_memory else DISK
        peer = self._peers.get((address, name))
        if peer is None:
            peer = PeerStore(address, name, self._token, self._timeout_s)
            self._peers[address, name] = peer
        return peer

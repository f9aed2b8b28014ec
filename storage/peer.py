"""A store on another host, over HTTP: the client of `peer_server`."""

from __future__ import annotations

from keepstep.storage.token import Token


class PeerStore:
    """The store that the data plane at `address` calls `name`. A `Store`, for several threads.

    Args:
        address: "host:port" of a keeper's data plane.
        name: "memory" (its pool) or "disk" (its directory).
        token: the job's.
        timeout_s: how long it may be silent: longer, and it counts as gone.
    """

    def __init__(self, address: str, name: str, token: Token, timeout_s: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections that lie idle. The store can be used again."""

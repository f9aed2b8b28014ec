"""What a keeper answers over the network: a thread with its own loop. No torch, no slowness shared."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.receiver import Receiver
from keepstep.ckpt.service import Answers, PeerSlots
from keepstep.storage.store import Store
from keepstep.storage.token import Token


class DataPlane:
    """The server. `start` binds and returns "host:port"; `close` ends it, its thread and sockets.

    Args:
        config: job, host, bind, port, advertise and patience are used.
        token: the job's. No token, no server.
        answers: the core.
        slots: for structures.
        stores: "memory" and, with a disk tier, "disk": readable by peers, never writable. A store
            that has `view(key) -> memoryview` is sent from that memory.
        receiver: takes peers' offers.
    """

    def __init__(
        self,
        config: KeeperConfig,
        token: Token,
        answers: Answers,
        slots: PeerSlots,
        stores: Mapping[str, Store],
        receiver: Receiver,
    ) -> None:
        raise NotImplementedError

    def start(self) -> str:
        """Listen. Returns "host:port". Raises OSError."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is going on, close all sockets, join the thread. Blocking, bounded."""

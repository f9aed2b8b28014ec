"""A rank's line to its keeper that outlasts the keeper: a successor is asked again.

What ranks ask at their beginning may be repeated: an inventory, a description, to enter. So when
the keeper dies meanwhile, its successor gets the same request, if it is there in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from keepstep.ckpt.control import Attached, Enter, Entered
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_errors import KeeperGone
from keepstep.ckpt.manifest import Description, State
from keepstep.ckpt.process import this_process

T = TypeVar("T")

_PAUSE_S = 0.1


class KeeperLine:
    """Asks the keeper of this host, again if it dies. All methods raise as `KeeperClient`'s.

    Args:
        client: connected, not attached; stays the caller's. A successor's answers may take as long.
        host_dir: where a successor is found.
        job, rank: who asks.
        timeout_s: how long a successor may take to come.
    """

    def __init__(
        self, client: KeeperClient, host_dir: Path, job: str, rank: int, timeout_s: float
    ) -> None:
        self._client = client
        self._host_dir = host_dir
        self._job = job
        self._rank = rank
        self._timeout_s = timeout_s
        self._own: KeeperClient | None = None

    def attach(self) -> Attached:
        """Say who asks. Before all else."""
        return self._again(self._attach, is_attaching=True)

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """See `KeeperClient.take_inventory`."""
        return self._again(lambda client: client.take_inventory(generation, term))

    def describe(self, state: State) -> Description:
        """See `KeeperClient.describe`."""
        return self._again(lambda client: client.describe(state))

    def enter(self, enter: Enter) -> Entered:
        """See `KeeperClient.enter`."""
        return self._again(lambda client: client.enter(enter))

    def close(self) -> None:
        """Close the connection to a successor, if there is one."""
        if self._own is not None:
            self._own.close()

    def _attach(self, client: KeeperClient) -> Attached:
        me = this_process()
        return client.attach(self._job, self._rank, me.pid, me.ticks)

    def _again(self, call: Callable[[KeeperClient], T], *, is_attaching: bool = False) -> T:
        try:
            return call(self._own or self._client)
        except KeeperGone as error:
            gone = error
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
            try:
                self.close()
                self._own = KeeperClient(self._host_dir, self._client.timeout_s)
                if not is_attaching:
                    self._attach(self._own)
                return call(self._own)
            except KeeperGone as error:
                gone = error
        raise gone

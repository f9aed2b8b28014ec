"""A rank's line to its host's keeper, for the beginning and the end of a run. Blocking."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from keepstep.ckpt.control import (
    FRAME_BYTES_MAX,
    Attach,
    Attached,
    Describe,
    Described,
    Enter,
    Entered,
    Leave,
    Left,
    Refused,
    Reply,
    Request,
    TakeInventory,
    Taken,
)
from keepstep.ckpt.errors import FormatError, NoSuchState
from keepstep.ckpt.frames import receive_frame, send_frame
from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_errors import KINDS, KeeperGone, KeeperRunning, Refusal
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.manifest import Description, State, decode_description
from keepstep.ckpt.pool_errors import PoolTooLarge

_REPLIES = msgspec.json.Decoder(Reply)

T = TypeVar("T", bound=Reply)


class KeeperClient:
    """One connection to the keeper of this host.

    Args:
        host_dir: the host directory.
        timeout_s: how long one answer may take.

    Raises (here and from every method):
        KeeperGone: nobody answers, or not in time. Make a new client when a keeper is back.
        Refusal: the keeper cannot do this; `Stale`, `SlotsTaken`, `NoSuchState`: where named.
    """

    def __init__(self, host_dir: Path, timeout_s: float) -> None:
        self._path = HostDir(host_dir).control
        self.timeout_s = timeout_s
        """How long one answer may take."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(self._path))
        except OSError as error:
            self._socket.close()
            raise self._gone(error) from error

    def attach(self, job: str, rank: int, pid: int, ticks: int) -> Attached:
        """Say who asks: always first. `ticks`: start time of the process `pid`."""
        return self._ask(Attach(job=job, rank=rank, pid=pid, ticks=ticks), Attached)

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """What this host has, as a promise that is durable on return. Raises Stale."""
        taken = self._ask(TakeInventory(generation=generation, term=term), Taken)
        return taken.inventory

    def describe(self, state: State) -> Description:
        """What a state in the inventory is. Raises NoSuchState and FormatError."""
        answer = self._ask(Describe(state), Described)
        return decode_description(answer.data, f"the keeper's description of {state_words(state)}")

    def enter(self, enter: Enter) -> Entered:
        """Enter a generation. Blocking: memory is made and touched.

        Raises Stale (a newer one was promised), SlotsTaken (a process of an older one lives on
        and there is no memory beside it), PoolTooLarge.
        """
        return self._ask(enter, Entered)

    def leave(self, *, is_finished: bool) -> None:
        """Say that this rank goes; `is_finished`: the run ended well, memory may go too."""
        self._ask(Leave(is_finished=is_finished), Left)

    def close(self) -> None:
        """Close the connection. The keeper goes by the process, not by the connection."""
        self._socket.close()

    def __enter__(self) -> KeeperClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, request: Request, expected: type[T]) -> T:
        try:
            send_frame(self._socket, request)
            reply: Reply | None = receive_frame(self._socket, _REPLIES, FRAME_BYTES_MAX)
        except (OSError, FormatError) as error:
            self._socket.close()
            raise self._gone(error) from error
        if reply is None:
            raise self._gone(ConnectionError("it closed the connection"))
        if isinstance(reply, Refused):
            raise _refusal(reply)
        if not isinstance(reply, expected):
            raise Refusal(f"the keeper answered {type(reply).__name__}, not {expected.__name__}")
        return reply

    def _gone(self, error: Exception) -> KeeperGone:
        return KeeperGone(
            f"no answer from the keeper at {self._path} within {self.timeout_s} s: {error}; "
            f"it is started with the job, and started again when it dies"
        )


def _refusal(refused: Refused) -> Exception:
    if refused.kind == NoSuchState.__name__:
        return NoSuchState(refused.message)
    if refused.kind == PoolTooLarge.__name__:
        return PoolTooLarge(refused.message, needed_bytes=0, available_bytes=0)
    if refused.kind == KeeperRunning.__name__:
        return KeeperRunning(refused.message, pid=0)
    return KINDS.get(refused.kind, Refusal)(refused.message)

"""The control socket: how a host's ranks speak to their keeper. A thread for each connection.

Nobody but this user is answered. What is not understood, too long, or out of order is refused, and
the connection closed; nothing that a client sends or leaves out holds others up.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from keepstep.ckpt.control import (
    FRAME_BYTES_MAX,
    Attach,
    Attached,
    Describe,
    Described,
    Enter,
    Entered,
    Left,
    Refused,
    Reply,
    Request,
    TakeInventory,
    Taken,
)
from keepstep.ckpt.errors import CheckpointError, FormatError
from keepstep.ckpt.frames import receive_frame, send_frame
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_errors import Refusal
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool_table import Writer
from keepstep.storage.errors import StoreError

FIRST_FRAME_BYTES_MAX = 1 << 12
CONNECTIONS_MAX = 256
FRAME_S = 30.0
"""How long the rest of a frame may take once it has begun."""

_REQUESTS = msgspec.json.Decoder(Request)
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Served(Protocol):
    """The keeper, as the control socket asks it; any of these may raise a CheckpointError."""

    def attach(self, attach: Attach) -> Attached:
        """A rank's process is here."""

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """See `Answers`."""

    def describe(self, state: State) -> bytes:
        """See `Answers`."""

    def enter(self, enter: Enter, writer: Writer) -> Entered:
        """See `entering.enter_rank`."""

    def leave(self, rank: int, writer: Writer, *, is_finished: bool) -> None:
        """A rank goes."""


class ControlServer:
    """Listens from construction on; serves from `start` on."""

    def __init__(self, path: Path, served: Served, on_refused: Callable[[str], None]) -> None:
        """Listen at `path`, in place of an earlier keeper. Raises OSError.

        `on_refused` hears of strangers and of what is no message.
        """
        self._served = served
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="keepstep-control", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Close the socket and all connections. Blocking, but for no client."""
        with self._lock:
            self._is_closed = True
            connections = tuple(self._connections)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                continue  # the client was gone again, or descriptors are short: its `connect` tells
            with self._lock:
                is_welcome = not self._is_closed and len(self._connections) < CONNECTIONS_MAX
                if is_welcome:
                    self._connections.add(connection)
            if not is_welcome:
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="keepstep-client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            uid = _uid_of(connection)
            if uid != os.geteuid():
                self._on_refused(f"a process of user {uid} tried to speak to this keeper")
                return
            self._converse(connection)
        except FormatError as error:
            self._on_refused(f"a client sent what is no message: {error}")
            with contextlib.suppress(OSError):
                send_frame(connection, Refused(Refusal.__name__, str(error)))
        except OSError:
            pass  # the client is gone: whether its process is, its pidfd says
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _converse(self, connection: socket.socket) -> None:
        attach: Attach | None = None
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        while True:
            connection.settimeout(None)
            poller.poll()  # for as long as a run lasts
            connection.settimeout(FRAME_S)
            bytes_max = FIRST_FRAME_BYTES_MAX if attach is None else FRAME_BYTES_MAX
            request: Request | None = receive_frame(connection, _REQUESTS, bytes_max)
            if request is None:
                return
            try:
                reply = self._answer(request, attach)
            except CheckpointError as error:
                send_frame(connection, Refused(type(error).__name__, str(error)))
                continue
            except (OSError, StoreError) as error:
                self._on_refused(f"{type(request).__name__} failed: {error}")
                send_frame(connection, Refused(Refusal.__name__, f"the keeper failed: {error}"))
                continue
            if isinstance(request, Attach):
                attach = request
            send_frame(connection, reply)

    def _answer(self, request: Request, attach: Attach | None) -> Reply:
        if isinstance(request, Attach):
            return self._served.attach(request)
        if attach is None:
            raise Refusal(f"{type(request).__name__} came before Attach")
        if isinstance(request, TakeInventory):
            return Taken(self._served.take_inventory(request.generation, request.term))
        if isinstance(request, Describe):
            return Described(self._served.describe(request.state))
        writer = Writer(attach.pid, attach.ticks)
        if isinstance(request, Enter):
            if request.rank != attach.rank:
                raise Refusal(f"rank {attach.rank} cannot enter as rank {request.rank}")
            return self._served.enter(request, writer)
        self._served.leave(attach.rank, writer, is_finished=request.is_finished)
        return Left()


def _uid_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])

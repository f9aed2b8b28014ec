"""The bell: how a rank wakes its keeper without waiting for it.

A datagram of one byte to a Unix socket. A ring may be lost (no keeper, a full queue); the keeper
looks by itself every so often.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

_RINGS_MAX = 64
_RING = b"."


class Ringer:
    """A rank's side. `ring` never blocks and never fails."""

    def __init__(self, path: Path) -> None:
        """`path`: the socket in the host directory, whether a keeper is there or not."""
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self) -> bool:
        """Wake the keeper. Whether the byte was taken: for tests; nothing depends on it."""
        try:
            self._socket.sendto(_RING, self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Bell:
    """The keeper's side."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`, in place of an earlier keeper. Raises OSError."""
        self._path = path
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        """To wait for: readable when somebody rang."""
        self.socket.setblocking(False)
        try:
            self.socket.bind(str(path))
        except OSError:
            self.socket.close()
            raise

    def clear(self) -> None:
        """Take all rings so far."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_RINGS_MAX):
                self.socket.recv(16)

    def close(self) -> None:
        """Stop listening. The path stays, for who removes the directory."""
        self.socket.close()

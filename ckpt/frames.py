"""Frames of the control socket: 4 bytes of length, big-endian, then JSON. Bounded both ways."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from keepstep.ckpt.control import FRAME_BYTES_MAX
from keepstep.ckpt.errors import FormatError

LENGTH_BYTES = 4


def send_frame(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send one message. Raises OSError (TimeoutError), and FormatError for one that is too long."""
    data = msgspec.json.encode(message)
    if len(data) > FRAME_BYTES_MAX:
        raise FormatError("frame", "", f"at most {FRAME_BYTES_MAX} bytes", f"{len(data)}")
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def receive_frame(
    connection: socket.socket, decoder: msgspec.json.Decoder[Any], bytes_max: int
) -> Any:  # noqa: ANN401  what the decoder gives
    """The next message, or None if the other side has closed between two messages.

    Raises OSError (TimeoutError; ConnectionError if it closed within one), and FormatError for
    what is longer than `bytes_max` (nothing of it is read) or no message of the decoder's type.
    """
    prefix = _receive(connection, LENGTH_BYTES, is_start=True)
    if prefix is None:
        return None
    length = int.from_bytes(prefix, "big")
    if length > bytes_max:
        raise FormatError("frame", "length", f"at most {bytes_max} bytes", f"{length}")
    data = _receive(connection, length, is_start=False) or b""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise FormatError("frame", "", "a message", str(error)[:120]) from error


def _receive(connection: socket.socket, length: int, *, is_start: bool) -> bytes | None:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(min(length - len(parts), 1 << 20))
        if not part:
            if is_start and not parts:
                return None
            raise ConnectionError(f"closed after {len(parts)} of {length} bytes")
        parts += part
    return bytes(parts)

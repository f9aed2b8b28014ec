"""Append-only files of JSON lines: one whole line a write, a torn last line repaired on opening.

Readers skip nothing: a line that is not JSON is an error, unless it is the torn last one.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.ckpt.errors import CheckpointError

WAITING_BYTES_MAX = 64 << 20
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class LinesError(CheckpointError):
    """A file of JSON lines cannot be written, or holds a line that is none."""


def to_json(value: object) -> object:
    """`value` with floats that JSON lacks as the strings "nan", "inf" and "-inf".

    Python's `float()` reads those back; all others round-trip exactly as they are.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    return value


class JsonLines:
    """A file that lines are appended to. Several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a torn last line, which a crash left, is cut off.

        Raises:
            LinesError: the file cannot be opened.
        """
        self.path = path
        self._waiting = b""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LinesError(f"{path}: cannot open for appending: {error.strerror}") from error

    def repair(self) -> int:
        """Cut a torn last line off; how many bytes went. Only for the one who holds the lock."""
        size_bytes = os.fstat(self._fd).st_size
        keep_bytes = _whole_lines_bytes(self._fd, size_bytes)
        if keep_bytes < size_bytes:
            os.ftruncate(self._fd, keep_bytes)
        return size_bytes - keep_bytes

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one object as one line. In the page cache on return: see `sync`.

        While the disk is full, lines wait in memory and are written, in order, with the next one
        that fits: a full disk stops no run.

        Raises:
            LinesError: the file system refused otherwise, or too much is waiting.
        """
        self._waiting += json.dumps(to_json(line), allow_nan=False).encode() + b"\n"
        self._write_waiting()
        if len(self._waiting) > WAITING_BYTES_MAX:
            raise LinesError(
                f"{self.path}: {len(self._waiting)} bytes of lines wait for a full disk; free some"
            )

    def sync(self) -> None:
        """Make what was appended durable, as far as the disk has room for it.

        Raises:
            LinesError: the file system refused otherwise.
        """
        self._write_waiting()
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _FULL:
                raise LinesError(f"{self.path}: cannot sync: {error.strerror}") from error

    def _write_waiting(self) -> None:
        """One write of all that waits, so that lines of two processes do not mix."""
        try:
            written = os.write(self._fd, self._waiting)
        except OSError as error:
            if error.errno not in _FULL:
                raise LinesError(f"{self.path}: cannot append: {error.strerror}") from error
            return
        self._waiting = self._waiting[written:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _whole_lines_bytes(fd: int, size_bytes: int) -> int:
    """Length of the part that ends with a newline."""
    end = size_bytes
    while end > 0:
        first = max(0, end - (1 << 16))
        newline = os.pread(fd, end - first, first).rfind(b"\n")
        if newline >= 0:
            return first + newline + 1
        end = first
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none if there is no file.

    Raises:
        LinesError: a line that is no JSON object; names its number.
    """
    return parse_lines(path.read_bytes(), path) if path.exists() else []


def parse_lines(data: bytes, path: Path) -> list[dict[str, Any]]:
    """All whole lines in `data`, which is of the file `path`. Raises as `read_lines`."""
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise LinesError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise LinesError(f"{path}:{number}: expected an object, found {text[:80]!r}")
        lines.append(value)
    return lines

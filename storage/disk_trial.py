"""How fast a disk takes and gives large files, past the page cache, as the disk tier does it."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from keepstep.storage.errors import NoSpace
from keepstep.storage.posix import Posix
from keepstep.storage.translate import translate

_PIECE_BYTES = 16 << 20
_SPARED_BYTES = 256 << 20
"""Never fill a disk closer than this."""


@dataclass(frozen=True, slots=True)
class DiskTrial:
    """What was measured. Speeds are in bytes per second.

    Attributes:
        size_bytes: written, and read again.
        is_direct: past the page cache (O_DIRECT); else the file system has no such writes.
        write_bytes_per_s: with the fsync at the end.
        read_bytes_per_s: of the same file.
        fsync_ms: of a small file and its directory.
        free_bytes: for this user, before the trial.
        total_bytes: the size of the file system.
    """

    size_bytes: int
    is_direct: bool
    write_bytes_per_s: float
    read_bytes_per_s: float
    fsync_ms: float
    free_bytes: int
    total_bytes: int


def try_disk(directory: str, bytes_max: int, seconds_max: float = 10.0) -> DiskTrial:
    """Write a file of at most `bytes_max` bytes, for about `seconds_max` at most, and read it.

    It is removed again. Blocking: up to three times `seconds_max` on a slow disk.

    Args:
        directory: where; it must exist.
        bytes_max: rounded up to 16 MiB.
        seconds_max: no new piece of 16 MiB is begun later.

    Raises:
        NoSpace: less than the smallest trial and a reserve of 256 MiB is free.
        StoreError: as the system's error says.
    """
    path = os.path.join(directory, f".keepstep-doctor-{secrets.token_hex(8)}")
    try:
        space = os.statvfs(directory)
        free_bytes = space.f_bavail * space.f_frsize
        pieces = _pieces(directory, bytes_max, free_bytes)
        try:
            with mmap.mmap(-1, _PIECE_BYTES) as piece:
                piece[:] = secrets.token_bytes(1 << 16) * (_PIECE_BYTES >> 16)
                written, is_direct, write_s = _write(path, piece, pieces, seconds_max)
                read, read_s = _read(path, piece, is_direct, seconds_max)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)
        fsync_ms = _small_fsync_ms(directory, path)
    except NoSpace:
        raise
    except OSError as error:
        raise translate(error, "try_disk", "", directory) from error
    return DiskTrial(
        written,
        is_direct,
        written / write_s,
        read / read_s,
        fsync_ms,
        free_bytes,
        space.f_blocks * space.f_frsize,
    )


def _pieces(directory: str, bytes_max: int, free_bytes: int) -> int:
    """How many pieces may be written."""
    pieces = min(-(-bytes_max // _PIECE_BYTES), (free_bytes - _SPARED_BYTES) // _PIECE_BYTES)
    if pieces < 1:
        raise NoSpace(
            f"{directory!r} has {free_bytes:,} bytes free, and a trial leaves"
            f" {_SPARED_BYTES:,} of them alone; free some space",
            operation="try_disk",
            where=directory,
            errno=errno.ENOSPC,
        )
    return pieces


def _write(path: str, piece: mmap.mmap, pieces: int, seconds_max: float) -> tuple[int, bool, float]:
    posix = Posix()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        is_direct = _set_direct(posix, fd)
        written = 0
        begun_s = time.perf_counter()
        while written < pieces * _PIECE_BYTES:
            count = os.pwrite(fd, piece, written)
            written += count
            # Behind a piece that was cut short no other can be written directly.
            if count < _PIECE_BYTES or time.perf_counter() - begun_s > seconds_max:
                break
        os.fsync(fd)
        return written, is_direct, time.perf_counter() - begun_s
    finally:
        os.close(fd)


def _read(path: str, piece: mmap.mmap, is_direct: bool, seconds_max: float) -> tuple[int, float]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if is_direct:
            _set_direct(Posix(), fd)
        done = 0
        begun_s = time.perf_counter()
        while read := os.preadv(fd, [piece], done):
            done += read
            if read < _PIECE_BYTES or time.perf_counter() - begun_s > seconds_max:
                break
        return done, time.perf_counter() - begun_s
    finally:
        os.close(fd)


def _set_direct(posix: Posix, fd: int) -> bool:
    try:
        posix.set_direct(fd, True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _small_fsync_ms(directory: str, path: str) -> float:
    """A small file and its directory made durable: what an append to a log costs here."""
    begun_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"small")
        os.fsync(fd)
    finally:
        os.close(fd)
        os.unlink(path)
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)
    return (time.perf_counter() - begun_s) * 1_000

"""What the machine can do at all, with the same bytes in the same run."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

WRITE_BYTES = 16 << 20
PAGE_BYTES = 4096
STREAMS = (1, 2, 3, 4)


class RawDisk:
    """O_DIRECT writes of `size_bytes` in all, straight from shared memory, and one fsync a file.

    Args:
        path: of the files; a number is added for each stream.
        size_bytes: all streams together.
        source_bytes: of the memory that is written again and again.
    """

    def __init__(self, path: Path, size_bytes: int, source_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes - size_bytes % (PAGE_BYTES * 12)
        map_bytes = max(source_bytes - source_bytes % WRITE_BYTES, WRITE_BYTES)
        self._map = mmap.mmap(-1, map_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        torch.frombuffer(self._map, dtype=torch.uint8).random_(0, 256)

    def write_s(self, streams: int) -> float:
        """Seconds until all is durable, by so many files and threads."""
        paths = [self._path.with_suffix(f".{stream}") for stream in range(streams)]
        for path in paths:
            path.unlink(missing_ok=True)
        size_bytes = self._size_bytes // streams
        threads = [threading.Thread(target=self._write, args=(path, size_bytes)) for path in paths]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - began_s
        for path in paths:
            path.unlink()
        return took_s

    def best_s(self) -> dict[str, float]:
        """Each number of streams once, and the best of them."""
        found = {f"raw_{streams}_streams": self.write_s(streams) for streams in STREAMS}
        return {**found, "raw": min(found.values())}

    def _write(self, path: Path, size_bytes: int) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o600)
        done = 0
        while done < size_bytes:
            start = done % len(self._view)
            count = min(WRITE_BYTES, size_bytes - done, len(self._view) - start)
            done += os.write(fd, self._view[start : start + count])
        os.fsync(fd)
        os.close(fd)


class WarmCopy:
    """One rank's copy of `size_bytes` from memory that is there to memory that is there."""

    def __init__(self, size_bytes: int) -> None:
        self._source = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)
        self._map = mmap.mmap(-1, size_bytes)
        self._target = torch.frombuffer(self._map, dtype=torch.uint8)
        self.run()

    def run(self) -> None:
        """Copy once."""
        self._target.copy_(self._source)


def loopback_s(directory: Path, size_bytes: int) -> float:
    """Seconds for one TCP stream on loopback: sendfile from a tmpfs file, received into memory.

    The sender is a process of its own.
    """
    source = directory / "loopback"
    with source.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    target = memoryview(mmap.mmap(-1, size_bytes))
    torch.frombuffer(target, dtype=torch.uint8).zero_()
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            _in_child(lambda: _send(source, size_bytes, server.getsockname()))
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"go")
            began_s, done = time.perf_counter(), 0
            while done < size_bytes:
                count = connection.recv_into(target[done:])
                if not count:
                    raise SystemExit("the sender of the loopback stream is gone")
                done += count
            took_s = time.perf_counter() - began_s
    os.waitpid(child, 0)
    source.unlink()
    return took_s


def _send(source: Path, size_bytes: int, address: tuple[str, int]) -> None:
    with source.open("rb") as file, socket.create_connection(address) as connection:
        connection.recv(2)
        connection.sendfile(file, 0, size_bytes)


def _in_child(call: Callable[[], None]) -> None:
    """Run, and end this process without the parent's clean-up."""
    code = 1
    try:
        call()
        code = 0
    finally:
        os._exit(code)

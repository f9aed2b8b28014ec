"""Big aligned writes bypass the page cache; everything else falls back, and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

from tests.kit.store_suite import page_aligned, pattern

from keepstep.storage.file import FileStore
from keepstep.storage.posix import Posix


class WatchedPosix(Posix):
    """Notes offset, length and directness of each write."""

    def __init__(self, refuse_direct: bool = False) -> None:
        self.direct = False
        self.refuse_direct = refuse_direct
        self.writes: list[tuple[bool, int, int]] = []

    def set_direct(self, fd: int, direct: bool) -> None:
        super().set_direct(fd, direct)
        self.direct = direct

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.direct and self.refuse_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.writes.append((self.direct, offset, data.nbytes))
        return super().pwrite(fd, data, offset)


def test_whole_blocks_go_directly_and_the_tail_does_not(tmp_path: Path) -> None:
    posix = WatchedPosix()
    data = pattern((33 << 20) + 4_096 + 5)
    FileStore(tmp_path, posix=posix).put("k", page_aligned(data))
    assert (tmp_path / "k").read_bytes() == data
    whole = len(data) - 5
    if posix.writes[0][0]:  # this file system can
        assert posix.writes == [
            (True, 0, 16 << 20),
            (True, 16 << 20, 16 << 20),
            (True, 32 << 20, whole - (32 << 20)),
            (False, whole, 5),
        ]


def test_small_objects_do_not_go_directly(tmp_path: Path) -> None:
    posix = WatchedPosix()
    FileStore(tmp_path, posix=posix).put("k", page_aligned(pattern((1 << 20) - 1)))
    assert posix.writes == [(False, 0, (1 << 20) - 1)]


def test_a_refused_direct_write_falls_back(tmp_path: Path) -> None:
    posix = WatchedPosix(refuse_direct=True)
    data = pattern(2 << 20)
    FileStore(tmp_path, posix=posix).put("k", page_aligned(data))
    assert posix.writes == [(False, 0, 2 << 20)]
    assert (tmp_path / "k").read_bytes() == data


def test_a_stream_goes_directly_as_long_as_it_stays_aligned(tmp_path: Path) -> None:
    posix = WatchedPosix()
    data = pattern((6 << 20) + 1)
    edges = [0, 2 << 20, 4 << 20, (4 << 20) + 1, len(data)]
    chunks = [page_aligned(data[a:b]) for a, b in itertools.pairwise(edges)]
    FileStore(tmp_path, posix=posix).put_stream("k", chunks, len(data))
    assert (tmp_path / "k").read_bytes() == data
    if posix.writes[0][0]:
        assert [direct for direct, _, _ in posix.writes] == [True, True, False, False]

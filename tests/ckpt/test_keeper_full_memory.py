"""Shared memory that others have filled since the pool was made."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from tests.kit.keepers import KitRank, eventually, keeper_host, make_structure
from tests.kit.mounts import small_tmpfs

from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool_table import SlotStatus

pytestmark = pytest.mark.ranks


def fill(path: Path) -> None:
    """Take all that is left of a file system."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        while True:
            os.write(fd, b"x" * 4096)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(fd)


def test_a_keeper_promises_and_is_started_anew_where_nothing_more_can_be_written(
    tmp_path: Path,
) -> None:
    with small_tmpfs(tmp_path / "shm", "size=8m") as shm:
        shm.chmod(0o700)
        with keeper_host(tmp_path) as host:
            host.start()
            with contextlib.closing(KitRank(host, make_structure(1, 1 << 16))) as rank:
                rank.seal(1, 0)
                fill(shm / "foreign")
                slot = rank.seal(2, 1)
                assert slot.status is SlotStatus.SEALED
                found = host.take_inventory(2, 2)
                host.kill()
                host.start()
                assert [copy.state for copy in found.copies] == [State(1, 1), State(1, 2)]
                assert host.take_inventory(3, 3).copies == found.copies
                eventually(lambda: len(host.events("keeper_started")) == 2, "started anew")

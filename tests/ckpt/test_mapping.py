"""Mapped memory: what cannot be had is an error and no signal."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from tests.kit.mounts import small_tmpfs

from keepstep.ckpt.mapping import StageMemory, StageTooLarge, populate
from keepstep.storage.local import is_local


def test_a_mapping_of_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 10))
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 64 << 10, flags=mmap.MAP_PRIVATE))
    populate(view)
    os.truncate(path, 4096)
    with pytest.raises(OSError, match="cannot be read"):
        populate(view)
    populate(view[:100])
    populate(view[:0])


def test_two_that_open_one_staging_file_see_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "stage-1"
    first, second = StageMemory(1 << 20, path), StageMemory(1 << 20, path)
    first.unlink()
    first.unlink()
    assert not path.exists()
    first.reserve(5000, 10)
    first.view[5000:5003] = b"abc"
    assert bytes(second.view[5000:5003]) == b"abc"
    assert path.parent.stat().st_mode
    first.close()
    second.close()


def test_a_staging_file_is_the_owner_s_alone_and_no_link_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "stage-1"
    memory = StageMemory(1, path)
    assert path.stat().st_mode & 0o777 == 0o600
    memory.close()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        StageMemory(1, path)


def test_staging_memory_costs_nothing_until_it_is_reserved(tmp_path: Path) -> None:
    path = tmp_path / "stage-1"
    memory = StageMemory(1 << 40, path)
    memory.reserve(1 << 39, 8192)
    assert path.stat().st_blocks * 512 < 1 << 20
    memory.close()


def test_a_tmpfs_that_is_full_is_an_error_with_numbers(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "size=1m") as place:
        memory = StageMemory(8 << 20, place / "stage-1")
        memory.reserve(0, 64 << 10)
        with pytest.raises(StageTooLarge, match="4,194,304 bytes"):
            memory.reserve(0, 4 << 20)
        memory.view[:3] = b"abc"
        memory.close()


def test_a_local_directory_is_told_from_others(tmp_path: Path) -> None:
    assert is_local(tmp_path) == is_local(os.path.realpath(tmp_path))
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        "2 1 0:5 / /mnt/with\\040space rw shared:1 - nfs4 server:/x rw\n"
        "3 1 0:6 / /mnt/with\\040space/local rw - xfs /dev/b rw\n"
        "4 1 0:7 / /over rw - ext4 /dev/c rw\n"
        "5 4 0:8 / /over rw - fuse.sshfs host: rw\n"
    )
    told = {
        path: is_local(path, str(mounts))
        for path in ("/a", "/mnt/with space/a", "/mnt/with space/local/a", "/over/a", "/overs")
    }
    assert told == {
        "/a": True,
        "/mnt/with space/a": False,
        "/mnt/with space/local/a": True,
        "/over/a": False,
        "/overs": True,
    }
    assert not is_local("/a", str(tmp_path / "none"))

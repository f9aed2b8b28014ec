"""A keeper that finds its host directory damaged, or has no room, says what to do next."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.keepers import KeeperHost, KitRank, keeper_host, make_structure

from keepstep.ckpt.host_damage import explained
from keepstep.ckpt.pool_errors import HostDirDamaged, HostDirFull

STRUCTURE = make_structure(1, 1 << 16)
END_S = 60.0


def cut_record(host: KeeperHost) -> None:
    host.place.keeper_json.write_bytes(host.place.keeper_json.read_bytes()[:-7])


def cut_structure(host: KeeperHost) -> None:
    (path,) = host.place.path.glob("structure-*.json")
    path.write_bytes(path.read_bytes()[:-7])


def lose_structure(host: KeeperHost) -> None:
    (path,) = host.place.path.glob("structure-*.json")
    path.unlink()


def cut_pool(host: KeeperHost) -> None:
    os.truncate(host.place.pool, 5000)


def link_pool(host: KeeperHost) -> None:
    other = host.directory / "other-pool"
    host.place.pool.rename(other)
    host.place.pool.symlink_to(other)


@pytest.mark.ranks
@pytest.mark.parametrize("damage", [cut_record, cut_structure, lose_structure, cut_pool, link_pool])
def test_damage_is_told_with_what_to_do(
    damage: Callable[[KeeperHost], None], tmp_path: Path
) -> None:
    with keeper_host(tmp_path) as host:
        host.start()
        with contextlib.closing(KitRank(host, STRUCTURE)) as rank:
            rank.seal(1, 0)
        host.kill()
        damage(host)
        successor = host.start(is_waited_for=False)
        assert successor.wait(END_S) == 4
        (line,) = host.output().splitlines()
        assert line.startswith("keeper: ")
        assert str(host.place.path) in line
        assert f"`keepstep clean --shm-dir {host.place.path.parent} --yes`" in line
        assert host.events("keeper_refused")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_told_with_what_to_do(number: int, tmp_path: Path) -> None:
    path = tmp_path / "shm" / "demo.h0"
    words = r"demo.h0/lock: .*; free space there .*`keepstep clean"
    with pytest.raises(HostDirFull, match=words), explained(path):
        raise OSError(number, os.strerror(number), str(path / "lock"))


def test_what_is_gone_stays_what_it_is_and_all_else_is_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explained(tmp_path):
        (tmp_path / "none").read_bytes()
    with pytest.raises(HostDirDamaged, match="Is a directory"), explained(tmp_path):
        tmp_path.read_bytes()

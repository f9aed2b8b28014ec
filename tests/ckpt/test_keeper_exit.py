"""A keeper that fails ends at once, whatever its threads wait for, and holds its lock till then."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
from pathlib import Path

import pytest
from tests.kit.keepers import TOKEN, KeeperHost, KitRank, keeper_host, make_structure

from keepstep.ckpt.keeper_record import read_record
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import State
from keepstep.ckpt.pool import Pool

pytestmark = pytest.mark.ranks

STRUCTURE = make_structure(1, 32 << 20)
END_S = 15.0


def reader_that_stops(host: KeeperHost, key: str) -> http.client.HTTPConnection:
    """Has begun to read an image that no socket buffer holds, and reads no more."""
    address, _, port = read_record(host.place.keeper_json).address.rpartition(":")
    connection = http.client.HTTPConnection(address, int(port), timeout=END_S)
    connection.request("GET", f"/v1/memory/{key}", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 200
    return connection


def damage_table(pool: Pool, index: int) -> None:
    """A status that there is none of: the keeper's look at the table fails."""
    pool.slots[index]._row[0] = 0xFF


def test_a_keeper_that_fails_ends_though_a_thread_of_it_waits(tmp_path: Path) -> None:
    with keeper_host(tmp_path, patience_s=120.0) as host:
        keeper = host.start()
        with contextlib.closing(KitRank(host, STRUCTURE)) as rank:
            slot = rank.seal(1, 0)
            reader = reader_that_stops(host, image_key(State(1, 1), 0))
            damage_table(rank.pool, slot.index)
            try:
                code = keeper.wait(END_S)
            except subprocess.TimeoutExpired:
                assert host.place.holder() is not None, "it lives on, and has let its lock go"
                raise
            finally:
                reader.close()
        assert code == 1
        assert "PoolDamaged" in host.output()

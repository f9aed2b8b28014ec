"""Which hosts a run has, and what their keepers are told."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from keepstep.ckpt.hostdir import check_host, host_dir_path
from keepstep.ckpt.tiers import Due
from keepstep.trainer.config import Config, load_config
from keepstep.trainer.errors import ConfigError
from keepstep.trainer.hosts import keeper_config, node, played_hosts, racks_of, shm_dir, tiers_of
from keepstep.trainer.rundir import RunDir


def config(*settings: str) -> Config:
    return load_config(None, settings)  # dp=2,tp=2,pp=2


def test_without_a_word_all_ranks_are_on_one_host() -> None:
    (host,) = played_hosts(config())
    assert (host.name, host.rack, host.ranks) == ("h0", "", tuple(range(8)))


def test_hosts_share_the_ranks_in_order() -> None:
    hosts = played_hosts(config("hosts.count=4", "hosts.racks=a,a,b,b"))
    assert [host.ranks for host in hosts] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [(host.name, host.rack) for host in hosts] == [
        ("h0", "a"),
        ("h1", "a"),
        ("h2", "b"),
        ("h3", "b"),
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("hosts.count=2", "hosts.ranks_per_host=2"), "2 x hosts.ranks_per_host 2 are 4 ranks"),
        (("hosts.count=3",), "8 ranks .* cannot be shared evenly by hosts.count 3"),
        (("hosts.count=2", "hosts.racks=a"), "names 1 racks .* there are 2 hosts"),
    ],
)
def test_hosts_that_do_not_fit_are_refused_with_both_numbers(
    settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        played_hosts(config(*settings))


def test_alone_there_are_no_peers_and_several_hosts_copy_to_one_another() -> None:
    assert tiers_of(config(), 1).peers == 0
    assert tiers_of(config(), 2).peers == 1
    assert tiers_of(config("tiers.peers=5"), 3).peers == 2


def test_checkpoints_are_the_store_tier_and_the_disk_has_its_own_beat() -> None:
    tiers = tiers_of(config(), 1)
    assert tiers.due(20, 0.0, 0.0) == Due.DISK | Due.STORE
    assert tiers.due(5, 0.0, 0.0) == Due.DISK
    assert tiers.due(7, 0.0, 0.0) == Due.NOWHERE
    assert (tiers.store.keep, tiers.disk.keep) == (5, 2)
    timed = tiers_of(config("run.checkpoint_every=0", "run.checkpoint_every_s=30"), 1)
    assert timed.due(7, 0.0, 30.0) == Due.STORE


def test_without_a_disk_nothing_is_due_there(tmp_path: Path) -> None:
    settings = config("tiers.disk_dir=")
    assert tiers_of(settings, 1).due(20, 1e9, 0.0) == Due.STORE
    (host,) = played_hosts(settings)
    assert keeper_config(settings, RunDir(tmp_path, None), "s", host, 1).disk_dir == ""


def test_a_keeper_is_told_places_that_hold_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config("hosts.count=2")
    host = played_hosts(settings)[1]
    told = keeper_config(settings, RunDir(Path("run"), None), "run/store", host, 2)
    assert told.store_url == str(tmp_path / "run" / "store")
    assert told.disk_dir == str(tmp_path / "run" / "hosts" / "h1" / "disk")
    assert told.token_file == str(tmp_path / "run" / "token")
    assert told.events_path == str(tmp_path / "run" / "events.jsonl")
    elsewhere = config("tiers.disk_dir=/nvme")
    assert keeper_config(elsewhere, RunDir(Path("run"), None), "s3://b/x", host, 2).disk_dir == (
        "/nvme/h1/disk"
    )
    assert keeper_config(elsewhere, RunDir(Path("run"), None), "s3://b/x", host, 2).store_url == (
        "s3://b/x"
    )


def test_two_run_directories_share_no_memory_and_one_finds_its_own_again(tmp_path: Path) -> None:
    first, second = (shm_dir(config(), tmp_path / name) for name in ("a", "b"))
    assert first != second
    assert first == shm_dir(config(), tmp_path / "x" / ".." / "a")
    assert first.name.startswith(f"keepstep-{os.geteuid()}.")
    assert host_dir_path(first, "demo", "h0").parent == first


def test_a_node_under_torchrun_is_named_as_its_system_or_as_told() -> None:
    host, count = node(config(), {})
    assert count == 1
    check_host(host.name)
    two = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    named, count = node(config("hosts.racks=a,b"), {**two, "KEEPSTEP_HOST": "n7"})
    assert (named.name, named.rack, named.index, count) == ("n7", "b", 1, 2)
    assert named.bind == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"hosts.count is 3, but torchrun started 2 nodes"):
        node(config("hosts.count=3"), two)


def test_racks_are_named_for_all_hosts_or_for_none() -> None:
    assert racks_of(config(), 3) == ["", "", ""]


def test_the_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    from keepstep.storage.token import make_token_file

    path = RunDir(tmp_path, None).token_path
    make_token_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

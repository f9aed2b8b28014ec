"""`show --sources`: what a restore would read, as the living keepers say."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from tests.kit.checkpoints import begin
from tests.kit.keepers import (
    JOB,
    TOKEN,
    KeeperHost,
    KitRank,
    eventually,
    keeper_host,
    make_structure,
)

from keepstep.ckpt.entry import Generation
from keepstep.ckpt.host_hints import HostHint, publish_hint
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.log import Log
from keepstep.ckpt.tiers import Tiers
from keepstep.cli import main
from keepstep.storage.file import FileStore


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str, int]:
    """What a command prints, and its exit status."""
    status = 0
    before, sys.argv = sys.argv, ["keepstep", *arguments]
    try:
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return out, err, status


def test_a_store_without_keepers_is_the_only_source_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEEPSTEP_TOKEN", raising=False)
    root = tmp_path / "store"
    root.mkdir()
    begin(FileStore(root), 5, 9)
    out, _, status = run(capsys, "show", str(root), "--sources", "--json")
    assert status == 0
    said = json.loads(out)
    assert said["state"] == {"generation": 1, "step": 9}
    assert said["is_committed"]
    assert [one["places"] for one in said["images"]] == [[{"tier": "store", "host": ""}]] * 2
    assert set(said["bytes"]) == {"store"}
    assert said["predicted_s"] > 0
    assert said["notes"] == ["keepers were not asked: KEEPSTEP_TOKEN is not set"]
    out, _, status = run(capsys, "show", f"{root}@5", "--sources")
    assert status == 0
    assert "step 5 of generation 1, committed" in out
    assert "keepers were not asked" in out


def refused_address() -> str:
    """Where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


def test_after_the_end_of_a_run_that_no_keeper_is_left_is_one_calm_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN", TOKEN)
    store = FileStore(tmp_path)
    begin(store, 5)
    for host in ("h0", "h1"):
        publish_hint(store, HostHint(host, refused_address(), "2026-01-01T00:00:00Z", 1))
    out, _, status = run(capsys, "show", str(tmp_path), "--sources")
    assert status == 0
    notes = [line for line in out.splitlines() if line.startswith("note:")]
    calm = "note: no keeper is left (h0, h1), as after every run that has ended"
    assert notes == [calm]
    assert "predicted  < 0.01 s for one host" in out
    publish_hint(store, HostHint("h1", "no host", "2026-01-01T00:00:00Z", 1))
    out, _, _ = run(capsys, "show", str(tmp_path), "--sources", "--json")
    first, second = json.loads(out)["notes"]
    assert first.startswith("h0: the keeper at 127.0.0.1")
    assert first.endswith("Connection refused")
    assert second.startswith("h1: ")


def test_a_step_that_is_nowhere_exits_2_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    begin(FileStore(root), 5)
    _, err, status = run(capsys, "show", f"{root}@6", "--sources")
    assert status == 2
    assert "no whole state at step 6" in err
    assert err.count("\n") == 1


def entered(hosts: list[KeeperHost]) -> list[KitRank]:
    """A rank on each host, in generation 1."""
    structure = make_structure(len(hosts))
    addresses = [
        HostAddress(host.config.host, "", host.take_inventory(1, 1).address) for host in hosts
    ]
    return [
        KitRank(host, structure, rank, hosts=range(len(hosts)), addresses=addresses)
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.ranks
def test_a_snapshot_is_shown_by_region_with_the_hosts_that_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN", TOKEN)
    tiers = Tiers(peers=1)
    with (
        keeper_host(tmp_path, "h0", tiers=tiers) as h0,
        keeper_host(tmp_path, "h1", tiers=tiers) as h1,
    ):
        h0.start()
        h1.start()
        store = FileStore(tmp_path / "store")
        log = Log(store, job=JOB)
        log.take_term("test")
        ranks = entered([h0, h1])
        log.append(
            Generation(
                number=1,
                hosts=("h0", "h1"),
                mesh=make_structure(2).mesh,
                base=None,
                parent=None,
                config={},
            )
        )
        for rank in ranks:
            rank.seal(7)
        for rank in ranks:
            eventually(lambda rank=rank: rank.seat.acked >= 7, "the peer has it")  # type: ignore[misc]
        hints = [tmp_path / "store" / "hosts" / f"{host}.json" for host in ("h0", "h1")]
        eventually(lambda: all(hint.exists() for hint in hints), "both hints")
        arguments = ("show", str(tmp_path / "store"), "--sources", "--on", "h1", "--match", "*/w")
        out, _, _ = run(capsys, *arguments, "--json")
        said = json.loads(out)
        out, _, _ = run(capsys, *arguments)
        for rank in ranks:
            rank.close()
    assert not said["is_committed"]
    assert said["state"] == {"generation": 1, "step": 7}
    assert [one["places"][0] for one in said["images"]] == [
        {"tier": "peer", "host": "h1"},
        {"tier": "memory", "host": "h1"},
    ]
    assert [(one["tensor"], one["image"], one["from"]["host"]) for one in said["regions"]] == [
        ("model/w", 0, "h1"),
        ("model/w", 1, "h1"),
    ]
    assert set(said["bytes"]) == {"own memory"}
    assert "not committed: a snapshot alone" in out
    assert "peer of h1" in out
    assert "memory of h0" in out


def test_a_reading_host_without_sources_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err, status = run(capsys, "show", str(tmp_path), "--on", "h1")
    assert status == 2
    assert "--on belongs to --sources" in err

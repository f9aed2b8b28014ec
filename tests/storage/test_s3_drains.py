"""Drains and commits on real object stores: one that keeps names free, and one that does not."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from tests.kit.crash_drain import drain_save
from tests.kit.crash_save import expected_files, faults_found, faults_going_on, prepare
from tests.kit.servers import BUCKET, Place
from tests.kit.shelved import JOB, Ear, Host, shelve, tenure_of

from keepstep.ckpt.drains import Drains
from keepstep.ckpt.errors import LogError
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.tiers import Due
from keepstep.storage.locate import open_store
from keepstep.storage.store import SingleWriterWarning

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture
def prefix() -> str:
    return f"drains/{secrets.token_hex(8)}"


@pytest.fixture
def seaweedfs(seaweedfs_place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in seaweedfs_place.server.environment.items():
        monkeypatch.setenv(name, value)
    return


@pytest.fixture
def rclone(rclone_place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in rclone_place.server.environment.items():
        monkeypatch.setenv(name, value)
    return


def test_a_save_on_s3_is_whole(seaweedfs: None, prefix: str) -> None:
    store = open_store(f"s3://{BUCKET}/{prefix}", create=True)
    prepare(store)
    drain_save(store)
    assert faults_found(store, True, expected_files()) == []
    assert faults_going_on(store) == []


def test_a_store_that_does_not_keep_names_free_gets_no_commit(rclone: None, prefix: str) -> None:
    url = f"s3://{BUCKET}/{prefix}"
    store = open_store(url, create=True)
    with pytest.raises(LogError, match="single_writer=true"):
        Log(store, job=JOB).take_term("rank 0")
    ear, host = Ear(), Host()
    drains = Drains(lambda: store, None, host.shelf, ear, job=JOB, patience_s=1.0)
    drains.enter(tenure_of())
    host.seal(shelve(State(1, 10), Due.STORE), drains.sealed)
    ear.wait_event("checkpoint_failed")
    assert "single_writer=true" in ear.reasons("checkpoint_failed")[0]
    drains.close(1.0)
    assert list(store.list("log/")) == []


def test_with_single_writer_it_does_and_what_is_lost_is_said(rclone: None, prefix: str) -> None:
    with pytest.warns(SingleWriterWarning, match="two runs"):
        store = open_store(f"s3://{BUCKET}/{prefix}?single_writer=true", create=True)
    prepare(store)
    drain_save(store)
    assert faults_found(store, True, expected_files()) == []

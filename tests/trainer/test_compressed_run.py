"""A run that compresses what it stores goes on from there as if it did not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.kit.runs import exact_lines, make_corpus, train

from keepstep.ckpt.events import read_events
from keepstep.ckpt.log import Log
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.verify import verify
from keepstep.storage.locate import open_store

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

TWO = ("--layout", "dp=2,tp=1,pp=1")


def test_a_compressed_run_goes_on_from_its_store_alone_in_another_layout(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    plain, run_dir = tmp_path / "plain", tmp_path / "run"
    settings = ["tiers.compress=zstd"]
    for directory, words in ((plain, []), (run_dir, settings)):
        status, text = train(directory, corpus, *TWO, "--steps", "3", settings=words)
        assert status == 0, text
        shutil.rmtree(directory / "hosts")
        status, text = train(
            directory, corpus, "--layout", "dp=1,tp=1,pp=1", "--steps", "6", settings=words
        )
        assert status == 0, text
        (resumed,) = read_events(directory, "resumed")
        assert resumed["base"][1] == 3
        assert set(resumed["read_bytes"]) == {"store"}
    assert exact_lines(run_dir) == exact_lines(plain)
    store = open_store(run_dir / "store")
    assert verify(store).findings == ()
    for commit in Log(store).read().live:
        manifest = open_checkpoint(store, commit).manifest
        assert [one.rank for one in manifest.encoded] == [one.rank for one in manifest.images]
    kept, stored = (
        sum(info.size_bytes for info in open_store(at / "store").list("states/"))
        for at in (plain, run_dir)
    )
    assert stored < 0.9 * kept

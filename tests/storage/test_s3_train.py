"""A training run whose store is a bucket: killed, resumed, listed, verified, collected."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.runs import SHM_DIR, end_keepers, kill_tree
from tests.kit.servers import BUCKET, SECRET_KEY, Place, Server

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.servers,
    pytest.mark.timeout(900),  # several processes that import torch, on a machine that is busy
]

SMALL = [
    "--layout=dp=2,tp=1,pp=1",
    "--checkpoint-every=2",
    "--set=run.evaluate_every=0",
    "--set=model.dim=32",
    "--set=model.layers=2",
    "--set=model.ffn_dim=64",
    "--set=model.seq_len=32",
    "--set=batch.global_batch=4",
    "--set=batch.micro_batch=1",
    f"--set=tiers.shm_dir={SHM_DIR}",
]
WITHOUT_TORCH = """
import sys
from keepstep.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules, "imported torch"
"""


def environment(server: Server) -> dict[str, str]:
    return {**os.environ, **server.environment, "OMP_NUM_THREADS": "1"}


def keepstep(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=240,
    )


def start_training(
    server: Server, directory: Path, url: str, steps: int
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "keepstep.cli", "train", f"--run-dir={directory / 'run'}"]
    with (directory / f"train-{steps}.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, f"--store={url}", f"--steps={steps}", *SMALL],
            env=environment(server),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def committed_steps(server: Server, url: str) -> list[int]:
    shown = keepstep(server, "ls", url, "--json")
    if shown.returncode != 0:
        return []
    return [row["step"] for row in json.loads(shown.stdout)["checkpoints"]]


@pytest.fixture(autouse=True)
def _no_keeper_stays(tmp_path: Path) -> Iterator[None]:
    yield
    end_keepers(tmp_path / "run")


def test_a_run_in_a_bucket_is_killed_and_resumed(seaweedfs_place: Place, tmp_path: Path) -> None:
    server, raw = seaweedfs_place.server, seaweedfs_place.raw
    prefix = f"train/{secrets.token_hex(8)}"
    url = f"s3://{BUCKET}/{prefix}"
    missing = keepstep(server, "ls", url)
    assert missing.returncode == 2, missing.stderr
    assert "nothing under this prefix" in missing.stderr

    first = start_training(server, tmp_path, url, 100_000)
    deadline_s = time.monotonic() + 240
    try:
        while not (before := committed_steps(server, url)):
            assert first.poll() is None, (tmp_path / "train-100000.txt").read_text()[-2_000:]
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()

    last = max(committed_steps(server, url))
    assert last >= max(before)
    # The keeper lives on, and may be some steps ahead of what it has brought to the bucket.
    target = last + 200
    second = start_training(server, tmp_path, url, target)
    try:
        assert second.wait(600) == 0, (tmp_path / f"train-{target}.txt").read_text()[-2_000:]
    finally:
        kill_tree(second)
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    (resumed,) = [event for event in map(json.loads, lines) if event["event"] == "resumed"]
    assert resumed["generation"] == 2
    assert last <= resumed["step"] < target
    assert max(committed_steps(server, url)) == target

    torn = f"{prefix}/states/g000001/s000000000001/r00000.safetensors"
    raw.begin_upload(torn, b"half an image")
    verified = keepstep(server, "verify", url, "--json")
    assert (verified.returncode, verified.stderr) == (0, ""), verified.stdout
    collected = keepstep(server, "gc", url, "--keep-last=1", "--json")
    assert (collected.returncode, collected.stderr) == (0, "")
    assert raw.uploads(prefix) == []
    assert committed_steps(server, url) == [target]
    assert keepstep(server, "verify", url).returncode == 0
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert SECRET_KEY.encode() not in file.read_bytes(), file

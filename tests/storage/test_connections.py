"""Connections to addresses that others gave: what is no address is told as such."""

from __future__ import annotations

import pytest

from keepstep.storage.connections import Connections, NotConnected


@pytest.mark.parametrize("host", ["x..y", "a" * 70 + ".de", "a\0b", "é" * 70])
def test_a_host_name_that_cannot_be_is_not_connected(host: str) -> None:
    connections = Connections(f"{host}:80", {}, 2.0)
    with pytest.raises(NotConnected), connections.request("GET", "/"):
        pass

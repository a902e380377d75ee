"""Servers for the sync tests."""

from __future__ import annotations

import pytest
from weight_server import WeightServer


@pytest.fixture
def make_server():
    """Builds running servers for a receiver path and a weight dtype; all stop with the test."""
    servers = []

    def make(receiver: str = "", dtype: str = "float32") -> WeightServer:
        servers.append(WeightServer(receiver, dtype).start())
        return servers[-1]

    yield make
    for server in servers:
        server.stop()

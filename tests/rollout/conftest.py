"""The stub server that the whole loop is run against, told anew by each test."""

import pytest

from tests.rollout.loop_harness import TOKENS
from tests.stub_server import control, stub_server


@pytest.fixture(scope="module")
def server():
    with stub_server(tokens=TOKENS, heads=2, bodies=11) as url:
        yield url


@pytest.fixture
def url(server):
    control(server, faults=[], delay_s=0.0, num_requests=0, max_in_flight=0, seen=[], metrics=None)
    yield server
    control(server, faults=[])

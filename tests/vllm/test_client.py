"""The client against real vLLM: what a Turn holds, what is refused, what is cancelled, and what a poll says."""

import urllib.request

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(vllm_server):
    return vllm_server()


def test_the_server_serves(server):
    with urllib.request.urlopen(server.url + "/v1/models", timeout=5) as answer:
        assert answer.status == 200

"""Several trainer ranks gather sharded tensors while they are sent: no dead-lock, and one failure text on all ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gathering_rank import SIZES, weight

from agrpo.sync.gloo import Gloo

SCRIPT = Path(__file__).with_name("gathering_rank.py")
ROOT = Path(__file__).parents[2]


def run_ranks(world_size: int, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank; ends them all after 180 s, of which imports on a busy machine may take most."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(SCRIPT), *arguments]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize(("mechanism", "world_size"), [("gloo", 2), ("gloo", 4), ("disk", 2)])
def test_hundred_syncs_of_sharded_weights_do_not_dead_lock(mechanism, world_size, make_server, tmp_path):
    server = make_server(Gloo.receiver)
    results = run_ranks(world_size, mechanism, server.url, str(tmp_path), "100")
    assert results == [(0, f"rank {rank} done\n") for rank in range(world_size)]
    assert server.version == "100" and not server.is_paused
    for name in SIZES:
        assert torch.equal(server.tensors[f"{name}.weight"], weight(name, 100))


def test_failure_of_rank_0_is_the_failure_of_all(make_server, tmp_path):
    server = make_server(Gloo.receiver)
    server.fail_at = "/update_weights"
    results = run_ranks(2, "gloo", server.url, str(tmp_path), "3")
    texts = {output.split(" ", 2)[2] for _, output in results}
    assert [code for code, _ in results] == [4, 4] and len(texts) == 1
    assert "/update_weights answered 500: told to fail; no weight was changed" in texts.pop()
    assert not server.is_paused

"""A recorded stream of samples gives the same losses on one rank and on two (LOSS-19), figures included."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agrpo import wire
from tests.standins import tiny_qwen3
from tests.train.recorded_groups import recorded_group

NUM_STEPS = 5


def losses(model: Path, stream: Path, num_ranks: int) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{k: str(v) for k, v in place.items()}, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.train.recorded_rank", str(model), str(stream)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks
    return json.loads(outputs[0])


def test_one_rank_and_two_give_the_same_losses(tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    rng = np.random.default_rng(11)
    stream = tmp_path / "stream.bin"
    stream.write_bytes(b"".join(wire.frame(recorded_group(rng, g)) for g in range(3 * NUM_STEPS)))
    one, two = losses(model, stream, 1), losses(model, stream, 2)
    assert len(one) == NUM_STEPS and len({round(r["loss"], 6) for r in one}) == NUM_STEPS
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name

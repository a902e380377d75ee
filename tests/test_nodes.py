"""A run over two nodes, here one rank each on loopback: the second joins by the torchrun command that the first prints."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from agrpo.launch.processes import free_ports
from tests.standins import tiny_dataset, tiny_qwen3
from tests.test_run import SMALL, records_of

ROOT = Path(__file__).parents[1]


def test_two_nodes_train_one_model(tmp_path):
    model, data = tiny_qwen3(tmp_path / "model"), tiny_dataset(tmp_path / "data.jsonl")
    (tmp_path / "odd.py").write_text("def odd(completion_ids, **columns):\n    return [float(sum(i) % 2) for i in completion_ids]\n")
    run = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    (port,) = free_ports(1)
    first = subprocess.Popen(
        [
            sys.executable, "-m", "agrpo", "train", f"model.path={model}", "data=jsonl", f"data.path={data}",
            "server=embedded", "sync=gloo", "scorer.functions=[odd.odd]", "rollout.group_size=4", "run.max_steps=500",
            "run.num_processes=1", "run.num_nodes=2", f"run.master=127.0.0.1:{port}", f"run.output_dir={run}", *SMALL,
        ],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    second = None
    try:
        line = next(line for line in first.stdout if "on node 1: torchrun" in line)
        words = shlex.split(line.split("on node 1: torchrun ")[1])
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        second = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 240
        while not ((run / "metrics.jsonl").exists() and len(records_of(run)) >= 2):
            assert first.poll() is None and time.monotonic() < deadline, first.stdout.read()
            time.sleep(0.2)
        first.send_signal(signal.SIGINT)
        output = first.communicate(timeout=120)[0]
        assert first.returncode == 130, output
        assert second.wait(60) == 0, second.stdout.read()
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
    record = records_of(run)[0]
    assert record["batch/samples_per_row"] * 2 == record["batch/samples_per_step"]  # a row for each node
    assert json.loads((run / "state" / "trainer1.exit.json").read_text())["code"] == 0
    assert list((run / "checkpoints").glob("step-*"))

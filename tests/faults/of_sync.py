"""Weight sync: each HTTP step refuses, hangs, or loses its server; what the server is left with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from agrpo.errors import ServerError
from agrpo.launch.processes import free_ports
from agrpo.sync.control import ServerControl
from agrpo.sync.gloo import Gloo
from tests.faults.table import Fault
from tests.sync.weight_server import WeightServer

ROOT = Path(__file__).parents[2]
# What each step leaves: no weight was sent yet, or all arrived and only a new sync may wake it.
STEPS = {
    "/init_weight_transfer_engine": "runs on with its old weights",
    "/pause": "runs on with its old weights",
    "/start_weight_update": "runs on with its old weights",
    "/update_weights": "runs on with its old weights",
    "/finish_weight_update": "stays paused, to be repaired",
    "/resume": "stays paused, to be repaired",
}
TENSORS = {f"w{i}": torch.full((13, 11), float(i)) for i in range(5)}


def failing(step: str, hangs: bool, folder: Path) -> str:
    server = WeightServer(Gloo.receiver).start()
    try:
        setattr(server, "hang_at" if hangs else "fail_at", step)
        sender = Gloo().open(ServerControl([server.url], 1.5), folder, torch.device("cpu"), rank=0, world_size=1)
        try:
            sender.send(iter(TENSORS.items()), 1, lambda: None)
            return "went through"
        except ServerError as error:
            assert ("no answer within 1.5 s" if hangs else "told to fail") in str(error) or "transfer" in str(error), error
        finally:
            sender.close()
        return "exit code 4, the server " + (
            "stays paused, to be repaired" if server.is_paused else "runs on with its old weights"
        )
    finally:
        server.fail_at = server.hang_at = None
        server.stop()


def mended(folder: Path) -> str:
    """After a failure in the middle, the next sync repairs the server."""
    server = WeightServer(Gloo.receiver).start()
    try:
        sender = Gloo().open(ServerControl([server.url], 5.0), folder, torch.device("cpu"), rank=0, world_size=1)
        server.fail_at = "/finish_weight_update"
        try:
            sender.send(iter(TENSORS.items()), 1, lambda: None)
        except ServerError:
            server.fail_at = None
        sender.reset()
        sender.send(iter(TENSORS.items()), 2, lambda: None)
        sender.close()
        return "repaired by the next sync" if server.version == "2" and not server.is_paused else "left broken"
    finally:
        server.stop()


def killed(number: signal.Signals, folder: Path) -> str:
    """The server's process dies, or stops, before the second sync."""
    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "tests/sync/weight_server.py"), str(port), Gloo.receiver]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout.readline() == "ready\n"
        url = f"http://127.0.0.1:{port}"
        sender = Gloo().open(ServerControl([url], 1.5), folder, torch.device("cpu"), rank=0, world_size=1)
        sender.send(iter(TENSORS.items()), 1, lambda: None)
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()
        try:
            sender.send(iter(TENSORS.items()), 2, lambda: None)
        finally:
            sender.close()
    finally:
        process.kill()
        process.wait()
    return "went through"


FAULTS = [
    *(Fault("sync", f"{step} refuses", f"exit code 4, the server {left}", partial(failing, step, False)) for step, left in STEPS.items()),
    *(Fault("sync", f"{step} hangs", f"exit code 4, the server {left}", partial(failing, step, True))
      for step, left in STEPS.items()),
    Fault("sync", "fails, then the next one", "repaired by the next sync", mended),
    Fault("sync", "server killed before it", "exit code 4", partial(killed, signal.SIGKILL), "weight sync of version 2 failed"),
    Fault("sync", "server stopped before it", "exit code 4", partial(killed, signal.SIGSTOP), "no answer within 1.5 s"),
]  # fmt: skip

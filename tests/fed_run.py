"""A run whose samples are a recorded stream: real trainer ranks and a real server, the rollout process played by a thread.

What reaches the trainer, and in which order, is the same each time, so that runs can be compared number by number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from agrpo import wire
from agrpo.config import check, compose, save
from agrpo.config.devices import Devices
from agrpo.errors import AgrpoError
from agrpo.ledger import Intervals
from agrpo.lifecycle import WIRE_PORT, Runtime, told_wire_port
from agrpo.types import ReadyGroup

ROOT = Path(__file__).parents[1]
KEY = "ab" * 32
PLAIN = (
    "data=jsonl", "scorer.functions=[agrpo.scorer.rewards.accuracy_reward]", "server=external", "sync=gloo", "run.use_cpu=true",
    "model.precision=no", "model.gradient_checkpointing=false", "rollout.max_staleness=1000", "run.parity_warn=null",
    "run.parity_stop=null", "optimizer.learning_rate=1e-3",
    "sampler.max_completion_length=13",
)  # fmt: skip


class Feed(threading.Thread):
    """Sends the groups that the trainer does not know yet, in order; ends with the run."""

    def __init__(self, run_dir: Path, groups: list[ReadyGroup]):
        super().__init__(daemon=True)
        self.run_dir, self.groups, self.start_state = run_dir, groups, None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(AgrpoError, OSError):  # a trainer that ended is the test's to judge
            asyncio.run(self._send())

    async def _send(self) -> None:
        link = await wire.connect("127.0.0.1", lambda: told_wire_port(self.run_dir), KEY, 120)
        self.start_state = start = link.start
        done = Intervals([*start.resolved, *((g, g + 1) for g in start.ready)])
        for group in self.groups:
            if group.group_id not in done:
                await link.send_ready(group)
        async for _ in link.incoming():
            pass
        await link.close()


class FedRun:
    """One start of the trainer ranks in `folder`; `end` waits for them."""

    def __init__(self, folder: Path, url: str, groups: list[ReadyGroup], *overrides: str, ranks: int = 1, limits=None):
        self.folder, self.run_dir = folder, folder / "run"
        settings = [f"run.output_dir={self.run_dir}", f"run.num_processes={ranks}", f"server.base_url={url}", *PLAIN, *overrides]
        config, _ = check(compose(settings), Devices())
        (self.run_dir / "state").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "state" / WIRE_PORT).unlink(missing_ok=True)
        save(config, self.run_dir, [])
        Runtime((url,), "127.0.0.1", 0, KEY, f"fed-{time.monotonic_ns()}").save(self.run_dir)
        self.log = self.run_dir / "trainer.log"
        from agrpo.launch.processes import free_ports

        (port,) = free_ports(1)
        self.processes = []
        with self.log.open("a") as log:
            for rank in range(ranks):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = {**os.environ, **{k: str(v) for k, v in place.items()}, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-m", "agrpo.train", str(self.run_dir)]
                self.processes.append(
                    subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, preexec_fn=limits)
                )
        self.feed = Feed(self.run_dir, groups)

    def end(self, limit_s: float = 120) -> list[int]:
        try:
            return [p.wait(limit_s) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def await_step(self, step: int, limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while len(self.records()) < step:
            assert all(p.poll() is None for p in self.processes) and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def records(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> list[int]:
        """SIGTERM to all ranks: the step in progress, a checkpoint, the end."""
        for process in self.processes:
            process.terminate()
        return self.end()

    def weights(self) -> dict:
        from safetensors.torch import load_file

        return load_file(self.run_dir / "model" / "model.safetensors")


@contextlib.contextmanager
def started_run(folder: Path, *overrides: str):
    """`agrpo train` on a tiny model, ended at the latest with the block."""
    from tests.test_restart import Run

    run = Run(folder, *overrides)
    try:
        yield run
    finally:
        run.popen.terminate()
        try:
            run.end(60)
        except subprocess.TimeoutExpired:
            run.popen.kill()

"""What feeding a trainer costs on its critical path: planner, wire and feed, while the step before is computed.

A producer in a process of its own sends groups of 8 answers of 3,072 tokens to prompts of 1,024, with 8 head entries per
trained token, over a real wire on loopback as fast as it is read. The trainer's half is the real feeder; its step is a
sleep of unique tokens / 100,000 s, the rate of a small model on one fast GPU, which leaves the interpreter to the other
threads as a GPU does. The critical path is what the training loop spends between two steps: taking the planned step, its
division among the ranks, and marking it as trained: its processor time, since on a busy machine the wall time, which is
printed too, is that of being scheduled again. The median step counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from agrpo import wire
from agrpo.ledger import AdmissionCredit, Ledger
from agrpo.sections import Rollout
from agrpo.train.feeder import Feeder
from agrpo.train.ranks import divide
from agrpo.train.shares import Sharing
from agrpo.types import ReadyGroup
from tests.bench.planner import GROUP_SIZE, make_samples, new_planner

RATE, STEPS, GROUPS, BUDGET, RANKS = 100_000, 9, 112, 65_536, 4


def run() -> list[dict[str, Any]]:
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        feeder = _feeder(Path(folder))
        feeder.open("127.0.0.1", 0, key, [])
        producer = subprocess.Popen([sys.executable, "-m", "tests.bench.feeding", str(feeder.port), key])
        try:
            critical, total, busy = _steps(feeder)
        finally:
            producer.kill()
            producer.wait()
            feeder.close()
    step_s, limit = statistics.median(total), 0.01
    share, wall = statistics.median(busy) / step_s, statistics.median(critical) / step_s
    return [
        {"bar": "feeding_ms_per_step", "value": round(1e3 * statistics.median(busy), 2), "unit": "ms", "limit": None, "ok": True},
        {"bar": "feeding", "value": round(share, 5), "unit": "of a step", "limit": limit, "ok": share <= limit},
        {"bar": "feeding_wall", "value": round(wall, 5), "unit": "of a step", "limit": None, "ok": True},
    ]  # fmt: skip


def _steps(feeder: Feeder) -> tuple[list[float], list[float], list[float]]:
    """Seconds per step: on the critical path, in all, and of this thread's processor; without the first step, which nothing
    overlaps."""
    critical, total, busy, sharing = [], [], [], Sharing()
    for number in range(STEPS + 1):
        began, began_busy = time.perf_counter(), time.thread_time()
        step = None
        while step is None:
            step = feeder.next_step(60.0)
        divide(step, sharing)
        taken = time.perf_counter()
        unique = max(sum(r.num_tokens for r in ranks) for ranks in zip(*(m.rows for m in step.microbatches), strict=True))
        time.sleep(unique / RATE)
        computed = time.perf_counter()
        feeder.trained(step)
        ended = time.perf_counter()
        if number:
            critical.append(taken - began + ended - computed)
            total.append(ended - began)
            busy.append(time.thread_time() - began_busy)
    return critical, total, busy


def _feeder(folder: Path) -> Feeder:
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.start("bench", None)
    return Feeder(
        planner=new_planner(),
        ledger=ledger,
        credit=AdmissionCredit(4, 4, BUDGET * RANKS),
        settings=Rollout(max_staleness=1000),
        version_at=lambda step: step,
        version=1,
        step=0,
    )


async def _produce(port: int, key: str) -> None:
    link = await wire.connect("127.0.0.1", port, key)
    samples = make_samples(2 * GROUP_SIZE, num_head=8)
    for number in range(GROUPS):
        first = number % 2 * GROUP_SIZE
        group = tuple(_renamed(s, number) for s in samples[first : first + GROUP_SIZE])
        rewards, slots = np.arange(GROUP_SIZE, dtype=np.float64), np.arange(GROUP_SIZE, dtype=np.int32)
        await link.send_ready(ReadyGroup(number, number, 0, group, rewards, {"correct": rewards}, slots, 1, time.time()))
    await asyncio.sleep(600)


def _renamed(sample: Any, group_id: int) -> Any:
    """The sample in another group, its first token made the group's own, so that groups share nothing."""
    tokens = sample.token_ids.copy()
    tokens[0] = group_id
    return dataclasses.replace(sample, token_ids=tokens, group_id=group_id)


if __name__ == "__main__":
    asyncio.run(_produce(int(sys.argv[1]), sys.argv[2]))

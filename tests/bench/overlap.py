"""Overlap: the real rollout process against a stub server of a known rate, the real feed, a trainer that only sleeps.

Generation and training are set to the same rate, where waits of one for the other cost most. Bar: wall time of 30 steps
after a warm-up over the larger of the two times, at most 1.06.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agrpo.ledger import AdmissionCredit, Ledger
from agrpo.lifecycle import Runtime
from agrpo.packer.cost import Cost
from agrpo.train.feeder import Feeder
from tests.standins import tiny_dataset, tiny_qwen3
from tests.stub_server import control, stub_server

TOKENS, SAMPLES_PER_STEP, TOKENS_PER_S = 64, 64, 8000.0
STEP_S = TOKENS * SAMPLES_PER_STEP / TOKENS_PER_S  # generation needs as long for the samples of one step
WARM_UP, STEPS = 8, 30
ROOT = Path(__file__).resolve().parents[2]


def length_parity(completion_ids, **columns):
    """A reward that differs between the stub's answers."""
    return [float(sum(int(i) for i in ids) % 7) for ids in completion_ids]


def run() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder, stub_server(tokens=TOKENS, heads=8, bodies=16, versions=0) as url:
        control(url, tokens_per_s=TOKENS_PER_S)
        wall, num_samples, waited = measure(Path(folder), url)
        # Both sides work at the same rate, so either time is the larger one.
        ratio, waited = wall / (num_samples * TOKENS / TOKENS_PER_S), waited / wall
    return [
        {"bar": "overlap_wall_over_max", "value": round(ratio, 4), "unit": "ratio", "limit": 1.06, "ok": ratio <= 1.06},
        {"bar": "overlap_trainer_wait", "value": round(waited, 4), "unit": "share of wall", "limit": None, "ok": True},
    ]


class AfterEachStep:
    """A sync that takes no time after every step."""

    def __init__(self, config, feeder: Feeder):
        self.feeder, self.version = feeder, 1

    def __call__(self, step: int) -> None:
        self.version += 1
        self.feeder.synced(self.version)


def measure(folder: Path, url: str, extra: tuple[str, ...] = (), sync=AfterEachStep, steps=STEPS) -> tuple[float, int, float]:
    """Seconds, samples and seconds of waiting of the steps after the warm-up."""
    config, run_dir = _prepare(folder, url, extra)
    feeder = _open_feeder(config, run_dir)
    command = [sys.executable, "-m", "agrpo.rollout", str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    rollout = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        after_step, began, waited, num_samples = sync(config, feeder), 0.0, 0.0, 0
        for index in range(WARM_UP + steps):
            if index == WARM_UP:
                began, waited, num_samples = time.perf_counter(), 0.0, 0
            asked = time.perf_counter()
            while (step := feeder.next_step(1.0)) is None:
                if rollout.poll() is not None:
                    raise RuntimeError(f"the rollout process ended with {rollout.returncode}")
            waited += time.perf_counter() - asked
            count = sum(len(r.sample_tokens) for m in step.microbatches for r in m.rows)
            num_samples += count
            time.sleep(STEP_S * count / SAMPLES_PER_STEP)
            feeder.trained(step)
            after_step(index + 1)
        wall = time.perf_counter() - began
    finally:
        feeder.close()
        rollout.wait(15)
    return wall, num_samples, waited


def _prepare(folder: Path, url: str, extra: tuple[str, ...]):
    from agrpo.config import check, compose, save
    from agrpo.config.devices import Devices

    tiny_qwen3(folder / "model")
    tiny_dataset(folder / "data.jsonl")
    run_dir = folder / "run"
    config, _ = check(
        compose([
            f"model.path={folder}/model", "data=jsonl", f"data.path={folder}/data.jsonl", "server=external",
            f"server.base_url={url}", "sync=gloo", "scorer.functions=[tests.bench.overlap.length_parity]",
            f"sampler.max_completion_length={TOKENS}", "packer=sequence", "packer.token_budget=8192", "run.use_cpu=true",
            f"run.output_dir={run_dir}", *extra,
        ]),
        Devices(),
    )  # fmt: skip
    (run_dir / "state").mkdir(parents=True)
    save(config, run_dir, [])
    return config, run_dir


def _open_feeder(config, run_dir: Path) -> Feeder:
    # Prompts have 20 to 40 tokens: about SAMPLES_PER_STEP samples fill a row of this budget.
    budget = SAMPLES_PER_STEP * (TOKENS + 32)
    planner = config.packer.planner(1, budget, Cost(1.0), 1)
    planner.token_budget = budget
    ledger = Ledger(run_dir / "ledger.jsonl")
    ledger.start("bench", None)
    rollout = config.rollout
    feeder = Feeder(
        planner=planner,
        ledger=ledger,
        credit=AdmissionCredit(rollout.max_staleness, rollout.allowance_window_steps, budget),
        settings=rollout,
        version_at=lambda step: step,
        version=1,
        step=0,
    )
    key = secrets.token_hex(16)
    feeder.open("127.0.0.1", 0, key, [])
    urls = (config.server.base_url,)
    Runtime(urls, "127.0.0.1", feeder.port, key, "bench").save(run_dir)
    return feeder

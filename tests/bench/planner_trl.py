"""Our planner and TRL's, on the same samples, in turns in one run: placing samples in rows, and the rows as arrays.

64 samples of 4,096 tokens in groups of 8 with a common prompt of 1,024, 4 rows of 65,536 tokens; log-probs of the sampled
token only, which is all TRL's rows carry. Processor seconds, the median of several rounds. TRL is installed from the registry
into an environment of its own, as for `rollout_trl`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.planner import best_time_s, make_samples, plan
from tests.bench.rollout_trl import RUN_LIMIT_S, not_installed, open_environment

SAMPLES, ROUNDS, LIMIT = 64, 3, 50.0


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            python = open_environment(folder)
        except (subprocess.SubprocessError, OSError) as error:
            return not_installed("planner_trl", LIMIT, error)
        samples = make_samples(SAMPLES)
        np.savez(
            Path(folder) / "samples.npz",
            token_ids=np.stack([s.token_ids for s in samples]),
            loss_mask=np.stack([s.loss_mask for s in samples]),
            sampler_logprobs=np.stack([s.sampler_logprobs for s in samples]),
            group_ids=np.array([s.group_id for s in samples]),
        )
        num_steps = plan(samples)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(best_time_s(samples, num_runs=3))
            theirs.append(_theirs(python, Path(folder) / "samples.npz"))
    mine, other = sorted(ours)[ROUNDS // 2], sorted(t["seconds"] for t in theirs)[ROUNDS // 2]
    ratio = round(other / mine, 1)
    return [
        {"bar": "planner_trl_agrpo", "value": round(1e3 * mine / SAMPLES, 3), "unit": "ms/sample", "limit": None, "ok": True},
        {"bar": "planner_trl_trl", "value": round(1e3 * other / SAMPLES, 3), "unit": "ms/sample", "limit": None, "ok": True},
        {"bar": "planner_trl_microbatches", "value": num_steps, "unit": f"TRL {theirs[0]['microbatches']}", "limit": None, "ok": True},
        {"bar": "planner_trl", "value": ratio, "unit": "x", "limit": LIMIT, "ok": ratio >= LIMIT},
    ]  # fmt: skip


def _theirs(python: str, samples: Path) -> dict[str, float]:
    result = subprocess.run(
        [python, str(Path(__file__).with_name("trl_planner.py")), str(samples)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_LIMIT_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(result.stdout.splitlines()[-1])

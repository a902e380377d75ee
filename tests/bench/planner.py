"""Planning speed and memory: samples in, whole steps with all row arrays out, on one core.

The second bar carries 8 head entries per trained token through, as the default loss needs them; the other bars have
none, so that the figures are those of planning and not of copying 100 MB.

Set-up: prompts of 1,024 tokens with 8 answers of 3,072, all random; rows for 4 processes with a budget of 65,536
tokens, 1 microbatch per step, the cost of Qwen3-1.7B. As in training, one planned step is held while the next is being
planned; memory counts both. Times are processor times of the one thread that plans, the best of several runs.
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from agrpo.packer.cost import Cost
from agrpo.packer.planner import Planner
from agrpo.packer.tree import Tree
from agrpo.types import Sample, Step

GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 8, 1024, 3072


def make_samples(num_samples: int, num_head: int = 0) -> list[Sample]:
    """Groups of 8 random samples of 4,096 tokens with a common prompt; every array is the sample's own."""
    rng = np.random.default_rng(17)
    prompts = rng.integers(0, 150_000, (num_samples // GROUP_SIZE, PROMPT_TOKENS), dtype=np.int32)
    mask = np.arange(PROMPT_TOKENS + ANSWER_TOKENS) >= PROMPT_TOKENS
    return [
        Sample(
            token_ids=np.concatenate(
                [prompts[i // GROUP_SIZE], rng.integers(0, 150_000, ANSWER_TOKENS, dtype=np.int32)]
            ),
            loss_mask=mask.copy(),
            sampler_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            versions=np.where(mask, 3, -1).astype(np.int32),
            advantage=float(i % GROUP_SIZE) - 3.5,
            head_ids=np.ones((ANSWER_TOKENS, num_head), np.int32),
            head_logprobs=np.full((ANSWER_TOKENS, num_head), -2.0, np.float32),
            candidates=None,
            group_id=i // GROUP_SIZE,
            rollout_index=i % GROUP_SIZE,
        )
        for i in range(num_samples)
    ]


def new_planner() -> Planner:
    cost = Cost.of_config(
        {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
        }
    )
    return Tree().planner(num_rows=4, token_budget=65_536, cost=cost, microbatches_per_step=1)


def plan(samples: list[Sample]) -> int:
    """Plan all samples; returns the number of steps."""
    planner, held, num_steps = new_planner(), None, 0
    for sample in samples:
        step = planner.add(sample)
        held, num_steps = _taken(step, held, num_steps)
    while (step := planner.flush()) is not None:
        held, num_steps = _taken(step, held, num_steps)
    return num_steps


def _taken(step: Step | None, held: Step | None, num_steps: int) -> tuple[Step | None, int]:
    return (held, num_steps) if step is None else (step, num_steps + 1)


def best_time_s(samples: list[Sample], num_runs: int) -> float:
    times = []
    for _ in range(num_runs):
        start = time.process_time()
        plan(samples)
        times.append(time.process_time() - start)
    return min(times)


def peak_memory(samples: list[Sample]) -> int:
    """Bytes allocated at most while planning, the held step included."""
    tracemalloc.start()
    try:
        plan(samples)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _bar(bar: str, value: float, unit: str, limit: float) -> dict:
    return {"bar": bar, "value": round(value, 3), "unit": unit, "limit": limit, "ok": value <= limit}


def run() -> list[dict]:
    samples = make_samples(512)
    plan(samples)
    small_s = best_time_s(samples, num_runs=7)
    memory = peak_memory(samples) / sum(s.token_ids.nbytes for s in samples)
    heads_s = best_time_s(make_samples(512, num_head=8), num_runs=7)
    large_s = best_time_s(make_samples(8_192), num_runs=2)
    return [
        _bar("planner_512_samples", small_s * 1e3, "ms", 100),
        _bar("planner_512_samples_with_8_head_entries", heads_s * 1e3, "ms", 100),
        _bar("planner_time_per_sample_8192_over_512", (large_s / 8_192) / (small_s / 512), "ratio", 1.5),
        _bar("planner_peak_memory_over_token_arrays", memory, "ratio", 3),
    ]

"""Two FSDP2 ranks against one on CPU: time and memory of a step, and how long the faster rank would wait for the slower.

Qwen3 architecture, vocabulary 4,096, float32, AdamW, checkpointed, one thread per rank. Both train the same two rows a step,
planned for two ranks; one rank runs them one after the other. balanced: answers of 64 tokens to prompts of 128, 4 each;
unbalanced: answers of 4 to 256 tokens.

Times: 4 layers, hidden 512, 32 answers. Processor seconds of each rank's forward, backward and update, the median of several
steps: a rank that waits for the other uses none, so the idle share of a step is 1 - mean / largest over the ranks. As a
reference, the same samples dealt out in turn instead of planned.
Memory: highest of a rank above its start. Of these 17 million parameters, where what sharding imports on first use weighs
more than they do; and of 134 million, 10 layers, hidden 1,024, 8 answers, where the training state weighs most, as it does
in training.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agrpo.loss.grpo import Grpo
from agrpo.model import attention
from agrpo.model.load import prepare
from agrpo.model.optim import Updater
from agrpo.model.shard import open_mesh, shard
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.packer.cost import Cost
from agrpo.packer.tree import Tree
from agrpo.sections import Fsdp, Model, Optimizer
from agrpo.train.ranks import Work, divide
from agrpo.train.shares import Sharing
from agrpo.types import Microbatch, Row, Sample, Step
from tests.memory import status_bytes

_VOCABULARY, _BUDGET, _REPEATS, _LIMIT_S = 4096, 8192, 3, 900


@dataclass(frozen=True)
class Size:
    """Of what is trained."""

    hidden: int
    layers: int
    prompts: int


_SIZES = {"timed": Size(512, 4, 8), "weighed": Size(1024, 10, 2)}


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        one, two = _measured(Path(folder), 1, "timed"), _measured(Path(folder), 2, "timed")
        weighed = _memory(_measured(Path(folder), 1, "weighed"), _measured(Path(folder), 2, "weighed"))
    busy = {kind: [rank["busy_s"][kind] for rank in two] for kind in ("balanced", "unbalanced", "dealt")}
    idle = {kind: 1 - statistics.mean(times) / max(times) for kind, times in busy.items()}
    alone = one[0]
    return [
        _bar("ranks_time", max(busy["balanced"]) / alone["busy_s"]["balanced"], "of 1 rank's step", 0.62),
        _bar("ranks_time_unbalanced", max(busy["unbalanced"]) / alone["busy_s"]["unbalanced"], "of 1 rank's step", 0.62),
        _bar("ranks_memory", weighed, "of 1 rank's peak", 0.75),
        _bar("ranks_memory_of_a_small_model", _memory(one, two), "of 1 rank's peak", None),
        _bar("ranks_idle_balanced", idle["balanced"], "of a step", 0.05),
        _bar("ranks_idle_unbalanced", idle["unbalanced"], "of a step", 0.1),
        _bar("ranks_idle_dealt_in_turn", idle["dealt"], "of a step", None),
    ]


def _bar(name: str, value: float, unit: str, limit: float | None) -> dict[str, Any]:
    return {"bar": name, "value": round(value, 3), "unit": unit, "limit": limit, "ok": limit is None or value <= limit}


def _memory(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> float:
    return max(rank["memory"] for rank in two) / one[0]["memory"]


def _measured(folder: Path, world_size: int, size: str) -> list[dict[str, Any]]:
    """What each rank of a run found."""
    address = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.bench.ranks", str(folder), str(rank), str(world_size), size],
            env={**os.environ, **address},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        return [json.loads(rank.communicate(timeout=_LIMIT_S)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _rank(folder: Path, rank: int, world_size: int, name: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/{name}{world_size}", None, world_size, rank)
    size = _SIZES[name]
    section = Model(path="-", precision="no", fsdp=Fsdp(enabled=world_size > 1))
    before = status_bytes("VmHWM")
    model = prepare(_model(size), section)
    cost = Cost.of_config(model.config)
    shard(model, section, open_mesh(section, "cpu"))
    updater, busy = Updater(model, Optimizer(name="adamw_torch"), None), {}
    even, uneven = _samples(None, size.prompts), _samples(7, size.prompts)
    plans = {"balanced": _planned(even, cost), "unbalanced": _planned(uneven, cost), "dealt": _dealt(uneven, cost)}
    for kind, rows in plans.items():
        microbatches = (Microbatch(rows),) if world_size > 1 else tuple(Microbatch((row,)) for row in rows)
        work = divide(Step(1, microbatches), Sharing())[rank]
        times = [_step(model, updater, work) for _ in range(_REPEATS)]
        busy[kind] = statistics.median(times)
    print(json.dumps({"busy_s": busy, "memory": status_bytes("VmHWM") - before}))
    torch.distributed.destroy_process_group()


def _step(model: torch.nn.Module, updater: Updater, work: Work) -> float:
    began, loss = time.process_time(), Grpo()
    for row, shares in zip(work.rows, work.shares, strict=True):
        terms = token_terms(model, DeviceRow.of(row, "cpu"), 1.0, want_head=False)
        updater.backward((loss(terms) * torch.from_numpy(shares)[terms.sample_index]).sum())
    updater.step()
    return time.process_time() - began


def _model(size: Size) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    attention.register()
    config = Qwen3Config(vocab_size=_VOCABULARY, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
                         num_hidden_layers=size.layers, num_attention_heads=size.hidden // 64,
                         num_key_value_heads=size.hidden // 128, head_dim=64,
                         attn_implementation=attention.NAME)  # fmt: skip
    return Qwen3ForCausalLM(config)


def _samples(seed: int | None, num_prompts: int) -> list[Sample]:
    """4 answers to each prompt of 128 tokens: of 64 tokens, or with a seed of 4 to 256."""
    rng = np.random.default_rng(seed or 0)
    prompts, samples = rng.integers(0, _VOCABULARY, (num_prompts, 128)), []
    for index in range(4 * num_prompts):
        length = 64 if seed is None else int(2 ** rng.uniform(2, 8))
        tokens = np.concatenate([prompts[index // 4], rng.integers(0, _VOCABULARY, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= 128
        samples.append(
            Sample(
                token_ids=tokens,
                loss_mask=mask,
                sampler_logprobs=np.where(mask, -8.3, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantage=1.0,
                head_ids=np.zeros((length, 0), np.int32),
                head_logprobs=np.zeros((length, 0), np.float32),
                candidates=None,
                group_id=index // 4,
                rollout_index=index % 4,
            )
        )
    return samples


def _planned(samples: list[Sample], cost: Cost) -> tuple[Row, ...]:
    planner = Tree().planner(2, _BUDGET, cost, 1)
    planner.rebuild(samples)
    return planner.flush().microbatches[0].rows


def _dealt(samples: list[Sample], cost: Cost) -> tuple[Row, ...]:
    rows = []
    for first in (0, 1):
        planner = Tree().planner(1, _BUDGET, cost, 1)
        planner.rebuild(samples[first::2])
        rows += planner.flush().microbatches[0].rows
    return tuple(rows)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

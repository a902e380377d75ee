"""Forward and backward of tree rows against plain sequence rows of the same samples, alternating in one run.

Times are processor times of one thread, the best of several, so that other work on the machine does not decide.

Qwen3 architecture, 4 layers, hidden 1,024, intermediate 3,072, 16 query and 8 key heads of 64, vocabulary 1,024,
float32, gradient checkpointing off, score centering with 8 head tokens, all 123 answer tokens of a sample trained.

shared    one group of 8 samples of 512 + 123 tokens: 5,080 raw against 1,503 unique tokens, packing ratio 3.38
unshared  3 samples of 88 + 123 tokens without a common prefix: the tree may cost nothing where nothing is shared
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import attention
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.packer.cost import Cost
from agrpo.packer.sequence import Sequence
from agrpo.packer.tree import Tree
from agrpo.types import Row, Sample

_VOCABULARY, _PROMPT, _ANSWER, _GROUP, _HEAD = 1024, 512, 123, 8, 8
_SHARED_REPEATS, _UNSHARED_REPEATS = 2, 8  # about 75 s in all


def run() -> list[dict[str, Any]]:
    """Two bars, each a ratio of speeds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _model()
        shared, unshared = samples_of(_GROUP, _PROMPT, is_shared=True), samples_of(3, 88, is_shared=False)
        _step(model, row_of(Tree(), shared))  # warm-up
        return [
            _bar("tree_step", model, shared, _SHARED_REPEATS, 2.9),
            _bar("tree_step_unshared", model, unshared, _UNSHARED_REPEATS, 0.97),
        ]
    finally:
        torch.set_num_threads(threads)


def _bar(name: str, model: torch.nn.Module, samples: list[Sample], repeats: int, limit: float) -> dict[str, Any]:
    rows = {"tree": row_of(Tree(), samples), "sequence": row_of(Sequence(), samples)}
    times: dict[str, list[float]] = {packer: [] for packer in rows}
    for repeat in range(repeats):
        for packer in sorted(rows, reverse=repeat % 2 == 0):
            times[packer].append(_step(model, rows[packer]))
    ratio = min(times["sequence"]) / min(times["tree"])
    return {"bar": name, "value": round(ratio, 3), "unit": "x sequence packing", "limit": limit, "ok": ratio >= limit}


def _step(model: torch.nn.Module, row: Row) -> float:
    """Processor seconds of one forward and backward, plan and copy to the device included."""
    model.zero_grad(set_to_none=True)
    loss, started = ScoreCentering(), time.process_time()
    terms = token_terms(model, DeviceRow.of(row, "cpu"), temperature=1.0, want_head=True)
    (loss(terms).sum() / row.num_trained_tokens).backward()
    return time.process_time() - started


def _model() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    attention.register()
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        attn_implementation=attention.NAME,
    )
    return Qwen3ForCausalLM(config).train()


def samples_of(count: int, prompt_tokens: int, is_shared: bool, group: int = 0) -> list[Sample]:
    """Samples of `prompt_tokens` + 123 tokens, of one group or of as many as there are samples."""
    rng = np.random.default_rng(group)
    prompt, length = rng.integers(0, _VOCABULARY, prompt_tokens), prompt_tokens + _ANSWER
    mask = np.arange(length) >= prompt_tokens
    samples = []
    for index in range(count):
        start = prompt if is_shared else rng.integers(0, _VOCABULARY, prompt_tokens)
        tokens = np.concatenate([start, [index], rng.integers(0, _VOCABULARY, _ANSWER - 1)]).astype(np.int32)
        samples.append(
            Sample(
                token_ids=tokens,
                loss_mask=mask,
                sampler_logprobs=np.where(mask, -6.9, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantage=1.0,
                head_ids=rng.integers(0, _VOCABULARY, (_ANSWER, _HEAD)).astype(np.int32),
                head_logprobs=np.full((_ANSWER, _HEAD), -6.9, np.float32),
                candidates=None,
                group_id=group if is_shared else index,
                rollout_index=index,
            )
        )
    return samples


def row_of(packer: Any, samples: list[Sample]) -> Row:
    """All samples in one row: the planner closes it when a sample beyond the budget arrives."""
    budget = sum(len(s.token_ids) for s in samples)
    planner = packer.planner(1, budget, Cost(1.0, 0.0), 1)
    for sample in samples:
        planner.add(sample)
    return planner.flush().microbatches[0].rows[0]

"""Forward and backward of tree rows against plain sequence rows, and a padded batch, of the same samples, alternating in one run.

Times are processor times of one thread, the best of several, so that other work on the machine does not decide.

Qwen3 architecture, 4 layers, hidden 1,024, intermediate 3,072, 16 query and 8 key heads of 64, float32, gradient
checkpointing off, score centering with 8 head tokens, all 123 answer tokens of a sample trained.

shared    one group of 8 samples of 512 + 123 tokens: 5,080 raw against 1,503 unique tokens, packing ratio 3.38. Vocabulary
          1,024: the head, which the tree does not shorten, is 2 % of the weights, so this is the gain of the decoder
padded    the same rows against transformers alone: one batch [8, 635], its own attention, logits at every position. The
          samples are of one length, so nothing is padding: the least that sharing gains over such a batch
head      as shared, vocabulary 17,359: the head is 0.353 of the decoder's matrices, as in Qwen3-0.6B (151,936 * 1,024 / 28 layers)
unshared  3 samples of 88 + 123 tokens without a common prefix: the tree may cost nothing where nothing is shared
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
_LARGE_VOCABULARY = 17359
_SHARED_REPEATS, _UNSHARED_REPEATS = 2, 8  # about four minutes in all


def run() -> list[dict[str, Any]]:
    """Four bars, each a ratio of speeds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shared, unshared = samples_of(_GROUP, _PROMPT, is_shared=True), samples_of(3, 88, is_shared=False)
        small, large = _timed(_VOCABULARY, shared, _SHARED_REPEATS), _timed(_LARGE_VOCABULARY, shared, _SHARED_REPEATS)
        apart = _timed(_VOCABULARY, unshared, _UNSHARED_REPEATS)
        return [
            _bar("tree_step", small, "sequence", 2.9),
            _bar("tree_step_padded", small, "padded", 2.9),
            _bar("tree_step_head", large, "sequence", 2.0),
            _bar("tree_step_unshared", apart, "sequence", 0.97),
        ]
    finally:
        torch.set_num_threads(threads)


def _bar(name: str, seconds: dict[str, float], other: str, limit: float) -> dict[str, Any]:
    ratio, unit = seconds[other] / seconds["tree"], {"sequence": "x sequence packing", "padded": "x padded batch"}[other]
    return {"bar": name, "value": round(ratio, 3), "unit": unit, "limit": limit, "ok": ratio >= limit}


def _timed(vocabulary: int, samples: list[Sample], repeats: int) -> dict[str, float]:
    """Best seconds of a step by each way of forwarding the samples, in turns."""
    ours, theirs = _model(vocabulary, attention.NAME), _model(vocabulary, "sdpa")
    tree, sequence = row_of(Tree(), samples), row_of(Sequence(), samples)
    ways: dict[str, Callable[[], float]] = {
        "padded": lambda: _padded_step(theirs, samples),
        "sequence": lambda: _step(ours, sequence),
        "tree": lambda: _step(ours, tree),
    }
    ways["tree"]()  # warm-up
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in sorted(ways, reverse=repeat % 2 == 0):
            times[way].append(ways[way]())
    return {way: min(found) for way, found in times.items()}


def _step(model: torch.nn.Module, row: Row) -> float:
    """Processor seconds of one forward and backward, plan and copy to the device included."""
    model.zero_grad(set_to_none=True)
    loss, started = ScoreCentering(), time.process_time()
    terms = token_terms(model, DeviceRow.of(row, "cpu"), temperature=1.0, want_head=True)
    (loss(terms).sum() / row.num_trained_tokens).backward()
    return time.process_time() - started


def _padded_step(model: torch.nn.Module, samples: list[Sample]) -> float:
    """Processor seconds of one forward and backward of all samples as a batch, padded behind to the longest."""
    model.zero_grad(set_to_none=True)
    started, longest = time.process_time(), max(len(s.token_ids) for s in samples)
    token_ids, trained = np.zeros((2, len(samples), longest), np.int64)
    lengths = np.array([len(s.token_ids) for s in samples])
    for index, sample in enumerate(samples):
        token_ids[index, : lengths[index]], trained[index, : lengths[index]] = sample.token_ids, sample.loss_mask
    mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
    tokens, counted = torch.from_numpy(token_ids), torch.from_numpy(trained[:, 1:])
    logits = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    (-(logprobs * counted).sum() / counted.sum()).backward()
    return time.process_time() - started


def _model(vocabulary: int, implementation: str) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    attention.register()
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        attn_implementation=implementation,
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

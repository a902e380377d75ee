"""Attention alone: the tree's rectangles against PyTorch's attention over the unrolled samples, on CPU, alternating.

Forward and backward, float32, 16 query and 8 key heads of 64, one thread, processor time, the best of several.

shared    8 samples of 512 + 123 tokens; unrolled they are one causal batch of 8 x 635 without padding. The scores under
          the masks are 0.7 against 1.6 million per head, 2.3 times as many.
unshared  the same tokens as 8 sequences of one row: what the tree costs where nothing is shared
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from agrpo.model.backends.rectangles import Rectangles
from agrpo.model.plan import TreePlan

_HEADS, _KV_HEADS, _WIDTH, _PROMPT, _ANSWER, _GROUP, _REPEATS = 16, 8, 64, 512, 123, 8, 5


def run() -> list[dict[str, Any]]:
    """Two bars, each a ratio of speeds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _bar("attention_shared", shared_plan(torch.device("cpu"), 1), 2.3),
            _bar("attention_unshared", unshared_plan(torch.device("cpu"), 1), 0.9),
        ]
    finally:
        torch.set_num_threads(threads)


def shared_plan(device: torch.device, groups: int) -> TreePlan:
    """Groups of a prompt of 512 tokens with 8 answers of 123."""
    lengths = [_PROMPT, *[_ANSWER] * _GROUP] * groups
    parents = [(-1 if i == 0 else g * (1 + _GROUP)) for g in range(groups) for i in range(1 + _GROUP)]
    return plan_of(lengths, parents, device)


def unshared_plan(device: torch.device, groups: int) -> TreePlan:
    """The same samples, each a sequence of its own."""
    count = groups * _GROUP
    return plan_of([_PROMPT + _ANSWER] * count, [-1] * count, device)


def plan_of(lengths: list[int], parents: list[int], device: torch.device) -> TreePlan:
    """The plan of a row with these segments in depth-first order."""
    ends = np.cumsum(lengths)
    starts, depth_starts = ends - lengths, np.zeros(len(lengths), np.int64)
    for s, parent in enumerate(parents):
        depth_starts[s] = 0 if parent < 0 else depth_starts[parent] + lengths[parent]
    depths = np.concatenate([np.arange(d, d + n) for d, n in zip(depth_starts, lengths, strict=True)])
    return TreePlan.of(starts, ends, np.array(parents), torch.from_numpy(depths).to(device))


def _bar(name: str, plan: TreePlan, limit: float) -> dict[str, Any]:
    tree, unrolled = _inputs(1, int(plan.ends[-1])), _inputs(_GROUP, _PROMPT + _ANSWER)
    calls = {
        "tree": lambda: Rectangles().attend(*tree, plan, None, None, _WIDTH**-0.5),
        "sdpa": lambda: scaled_dot_product_attention(*unrolled, is_causal=True, enable_gqa=True),
    }
    inputs, times = {"tree": tree, "sdpa": unrolled}, {"tree": [], "sdpa": []}
    for repeat in range(_REPEATS + 1):
        for kind in sorted(calls, reverse=repeat % 2 == 0):
            times[kind].append(_time(calls[kind], inputs[kind]))
    ratio = min(times["sdpa"][1:]) / min(times["tree"][1:])  # the first of each is a warm-up
    return {"bar": name, "value": round(ratio, 2), "unit": "x unrolled SDPA", "limit": limit, "ok": ratio >= limit}


def _inputs(batch: int, tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values as a model's projections leave them: [B, N, H, D] in memory."""
    torch.manual_seed(0)
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    return [torch.randn(batch, tokens, h, _WIDTH).transpose(1, 2).requires_grad_() for h in heads]


def _time(call: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    started = time.process_time()
    torch.autograd.grad(call().sum(), inputs)
    return time.process_time() - started

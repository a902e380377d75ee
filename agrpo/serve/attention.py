"""Attention over flat tokens of many requests: causal inside new prompts, over cached slots for running requests.

One forward carries [prompt tokens of new requests | one token of each running request] as a batch of one sequence.
The `StepLayout` that travels through the model's keyword arguments says where each token belongs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from agrpo.serve.cache import Pool
from agrpo.serve.linear import StateSpan

NAME = "agrpo_slots"


@dataclass(slots=True)
class PoolWrite:
    """Where a step's keys and values go in one pool."""

    pool: Pool
    source: torch.Tensor | None  # [w] token of the step, None = the tokens `start`.. in order
    start: int
    target: torch.Tensor  # [w * kv heads] row of the pool's layer seen as [slots * kv heads * capacity, head size]


@dataclass(slots=True)
class PoolRead:
    """The running requests of one pool: n tokens of the step from `start`, in slot order."""

    pool: Pool
    start: int
    num_requests: int
    width: int  # longest context among them
    mask: torch.Tensor  # [n, 1, width] float32, 0 or -inf
    positions: torch.Tensor  # [n] position of each token


@dataclass(slots=True)
class StepLayout:
    segments: list[tuple[int, int]]  # half-open token ranges of new prompts
    reads: list[PoolRead]
    writes: list[PoolWrite]
    states: list[StateSpan]  # together every token once, for layers that keep a state per request


def register() -> None:
    """Make the attention known to transformers; without a mask function of that name, no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: StepLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, N, size], key and value [1, kv heads, N, size]; gives [1, N, heads, size]."""
    layer, scale = module.layer_idx, scaling if scaling is not None else query.shape[-1] ** -0.5
    flat_key, flat_value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [N, kv heads, size]
    for write in layout.writes:
        _store(write.pool.keys[layer], flat_key, write)
        _store(write.pool.values[layer], flat_value, write)
    outputs = [
        _causal(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale, sliding_window) for a, b in layout.segments
    ]
    flat_query = query[0].transpose(0, 1)  # [N, heads, size]
    outputs += [_read(read, layer, flat_query, scale, sliding_window) for read in layout.reads]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat[None], None


def _store(memory: torch.Tensor, tokens: torch.Tensor, write: PoolWrite) -> None:
    size = tokens.shape[-1]
    if write.source is not None:
        tokens = tokens.index_select(0, write.source)
    else:
        tokens = tokens[write.start : write.start + len(write.target) // tokens.shape[1]]
    memory.view(-1, size).index_copy_(0, write.target, tokens.reshape(-1, size))


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """A new prompt against itself; gives [P, heads, size]."""
    length, mask = query.shape[2], None
    if window is not None and length > window:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance[None, :]
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _read(read: PoolRead, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """One token per running request against its slot; gives [n, heads, size].

    Two batched products over a view of the pool: at these widths faster on CPU than the fused kernel, and no copy.
    """
    keys, values = read.pool.keys[layer], read.pool.values[layer]
    n, width, (kv_heads, capacity, size) = read.num_requests, read.width, keys.shape[1:]
    heads = query.shape[1]
    mask = read.mask
    if window is not None and width > window:
        distance = read.positions[:, None, None] - torch.arange(width, device=query.device)
        mask = mask.masked_fill(distance >= window, -torch.inf)
    rows = query[read.start : read.start + n].reshape(n * kv_heads, heads // kv_heads, size)
    keys = keys.view(-1, capacity, size)[: n * kv_heads, :width]
    values = values.view(-1, capacity, size)[: n * kv_heads, :width]
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(n, heads, width).float()
    weights = torch.softmax(scores.mul_(scale).add_(mask), dim=-1).to(query.dtype)
    return torch.bmm(weights.view(n * kv_heads, -1, width), values).view(n, heads, size)

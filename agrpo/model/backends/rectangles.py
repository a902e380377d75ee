"""Exact tree attention in plain torch on any device: the reference, and the back end of CPUs.

Each rectangle of the row's plan runs alone; partial results are joined by log-sum-exp, and the backward pass of a
rectangle uses the joined output, so that forward and backward hold O(tokens) memory (PACK-3, PACK-6, PACK-9).
"""

from __future__ import annotations

import torch

from agrpo.model.backends.choice import Case
from agrpo.model.plan import Block, TreePlan

_LEAST_CHUNK = 256  # queries per tile of scores
_GPU_TILE = 1 << 25  # scores per tile on a GPU, where few launches count more than a cache


class Rectangles:
    """Rectangles of queries and keys, nothing gathered."""

    name = "torch"

    def lacks(self, case: Case) -> str | None:
        """Nothing: it runs everywhere."""
        return None

    def attend(self, query, key, value, plan, window, softcap, scale) -> torch.Tensor:
        """[1, H, N, D] queries, [1, Hkv, N, D] keys and values to [1, N, H, D]."""
        return _TreeAttention.apply(query, key, value, plan, window, softcap, scale).transpose(1, 2)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, plan, window, softcap, scale):
        _, heads, tokens, _ = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(1, tokens, heads, value.shape[-1], dtype=exact).transpose(1, 2)
        lse = query.new_empty(1, heads, tokens, dtype=exact)
        blocks = plan.blocks(window)
        for block in blocks.own:
            part = _forward(block, query, key, value, plan, window, softcap, scale)
            _put(out, block, part[0])
            _put(lse, block, part[1])
        for block in blocks.cross:
            _join(
                out[:, :, block.query],
                lse[:, :, block.query],
                *_forward(block, query, key, value, plan, window, softcap, scale),
            )
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.plan, ctx.window, ctx.softcap, ctx.scale = plan, window, softcap, scale
        return result

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        exact = lse.dtype
        # [1, N, H, D] in memory, as the projections that consume them read it.
        grads = tuple(
            x.new_zeros(1, x.shape[2], x.shape[1], x.shape[3], dtype=exact).transpose(1, 2) for x in (query, key, value)
        )
        blocks = ctx.plan.blocks(ctx.window)
        for block in (*blocks.own, *blocks.cross):
            parts = _backward(block, grad_out, query, key, value, out, lse, ctx)
            for grad, part, span in zip(grads, parts, (block.query, block.key, block.key), strict=True):
                _add(grad, block, span, part)
        return *(g.to(query.dtype) for g in grads), None, None, None, None


def _take(x: torch.Tensor, block: Block, span: slice) -> torch.Tensor:
    """Rows of a block: [1, H, n, ...] for a slice, [B, H, L, ...] for a bucket."""
    return x[:, :, span] if block.index is None else x[0][:, block.index].transpose(0, 1)


def _put(x: torch.Tensor, block: Block, part: torch.Tensor) -> None:
    if block.index is None:
        x[:, :, block.query] = part
    else:
        x[0].index_copy_(1, block.rows, _packed(part, block).to(x.dtype))


def _add(x: torch.Tensor, block: Block, span: slice, part: torch.Tensor) -> None:
    if block.index is None:
        x[:, :, span] += part
    else:
        x[0].index_add_(1, block.rows, _packed(part, block).to(x.dtype))


def _packed(part: torch.Tensor, block: Block) -> torch.Tensor:
    """[B, H, L, ...] of a bucket to [H, n, ...] without padding; by positions, as a mask would make the host wait."""
    return part.transpose(0, 1).flatten(1, 2).index_select(1, block.slots)


def _join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Softmax over the union of two disjoint key sets, in place: outputs weighted by their share of the mass."""
    joined = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_((lse - joined).exp_().unsqueeze(-1)).add_(part * (part_lse - joined).exp_().unsqueeze(-1))
    lse.copy_(joined)


def _is_fused(block: Block, query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    return (
        query.device.type == "cpu" and softcap is None and block.kind != "band" and query.shape[-1] == value.shape[-1]
    )


def _forward(block, query, key, value, plan, window, softcap, scale) -> tuple[torch.Tensor, torch.Tensor]:
    fused = _is_fused(block, query, value, softcap)
    q, k, v = _take(query, block, block.query), _take(key, block, block.key), _take(value, block, block.key)
    if fused:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, block.kind == "causal", scale=scale)
    return _plain_forward(q, k, v, _Tile(block, plan, window, softcap, scale))


def _backward(block, grad_out, query, key, value, out, lse, ctx) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _take(query, block, block.query), _take(key, block, block.key), _take(value, block, block.key)
    g, o, part_lse = (_take(x, block, block.query) for x in (grad_out, out, lse))
    if block.valid is not None:
        g = g * block.valid[:, None, :, None]
    if _is_fused(block, query, value, ctx.softcap):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(g, q, k, v, o, part_lse, 0.0, block.kind == "causal", scale=ctx.scale)
    return _plain_backward(g, q, k, v, o, part_lse, _Tile(block, ctx.plan, ctx.window, ctx.softcap, ctx.scale))


class _Tile:
    """Scores of a few queries of one rectangle, and the way back through them, by plain matrix products."""

    def __init__(self, block: Block, plan: TreePlan, window: int | None, softcap: float | None, scale: float):
        self.block, self.plan, self.window, self.softcap, self.scale = block, plan, window, softcap, scale

    def scores(self, q: torch.Tensor, k: torch.Tensor, first: int) -> torch.Tensor:
        """[B, Hkv, g, c, D] and [B, Hkv, 1, n, D] to [B, Hkv, g, c, n]; -inf where hidden."""
        scores = (q @ k.transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = self._hidden(first, q.shape[-2], k.shape[-2])
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    def _hidden(self, first: int, queries: int, keys: int) -> torch.Tensor | None:
        depths = self.plan.depths
        if self.block.kind == "full":
            return None
        if self.block.kind == "causal":
            at = torch.arange(first, first + queries, device=depths.device)
            return at[:, None] < torch.arange(keys, device=depths.device)
        query_depth = depths[self.block.query][first : first + queries, None]
        key_depth = depths[self.block.key][None]
        return (key_depth > query_depth) | (key_depth <= query_depth - self.window)

    def grad_scores(self, grad: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Gradient of the products q k from that of the (soft-capped) scores."""
        if self.softcap is not None:
            slope = 1 - (scores / self.softcap) ** 2
            grad = grad * torch.where(torch.isfinite(slope), slope, 0.0)
        return grad * self.scale


def _query_chunk(q: torch.Tensor, k: torch.Tensor) -> int:
    """Queries per tile of scores."""
    per_query = q.shape[:-2].numel() * k.shape[-2]
    return max(_LEAST_CHUNK, _GPU_TILE // per_query) if q.is_cuda else _LEAST_CHUNK


def _grouped(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, H, n, D] to [B, Hkv, H / Hkv, n, D]: query heads beside the key head they share."""
    batch, heads, *rest = x.shape
    return x.to(dtype).reshape(batch, kv_heads, heads // kv_heads, *rest)


def _plain_forward(q, k, v, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor]:
    exact, kv_heads = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    q, k, v = _grouped(q, kv_heads, exact), _grouped(k, kv_heads, exact), _grouped(v, kv_heads, exact)
    outs, lses, chunk = [], [], _query_chunk(q, k)
    for first in range(0, q.shape[-2], chunk):
        scores = tile.scores(q[..., first : first + chunk, :], k, first)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp_() @ v)
        lses.append(lse)
    return torch.cat(outs, -2).flatten(1, 2), torch.cat(lses, -1).flatten(1, 2)


def _plain_backward(g, q, k, v, out, lse, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    exact, kv_heads = lse.dtype, k.shape[1]
    g, q, k, v, out = (_grouped(x, kv_heads, exact) for x in (g, q, k, v, out))
    lse, delta = _grouped(lse, kv_heads, exact), (g * out).sum(-1)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    chunk = _query_chunk(q, k)
    for first in range(0, q.shape[-2], chunk):
        at = slice(first, first + chunk)
        scores = tile.scores(q[..., at, :], k, first)
        weights = (scores - lse[..., at].unsqueeze(-1)).exp()
        grad = tile.grad_scores(weights * (g[..., at, :] @ v.transpose(-1, -2) - delta[..., at].unsqueeze(-1)), scores)
        grad_q[..., at, :] = grad @ k
        grad_k += (grad.transpose(-1, -2) @ q[..., at, :]).sum(2, keepdim=True)
        grad_v += (weights.transpose(-1, -2) @ g[..., at, :]).sum(2, keepdim=True)
    return grad_q.flatten(1, 2), grad_k.flatten(1, 2), grad_v.flatten(1, 2)

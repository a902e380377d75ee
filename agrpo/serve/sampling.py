"""Draw one token per row from processed logits, and report it as vLLM's `processed_logprobs` does (GEN-7, GEN-8, SAMP-1).

Order: temperature, min-p, top-k, top-p; log-probabilities are renormalised over what is kept. The draw at output
position i depends on (seed, i) and the row's distribution only, so that an answer does not depend on its neighbours
in the batch: one counter-based uniform number per row, inverted through the row's cumulative distribution.

Shapes: B rows, V vocabulary, C widest candidate set, K head entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

_BLOCK = 256  # entries


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; `seed` is any 64-bit number."""

    temperature: float = 1.0  # 0 = most likely token
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = 0  # head entries reported per token

    @property
    def is_truncated(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(slots=True)
class Draws:
    """One drawn token per row, as Python lists of length B (they go into JSON)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 = most likely
    head_ids: list[list[int]]  # ranked, at least the requested number where the row has so many
    head_logprobs: list[list[float]]  # -inf outside the candidate set
    candidates: list[list[int] | None]  # ranked candidate ids; None for a row sampled from the whole vocabulary


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B] float64 in [0, 1): two rounds of splitmix64 over (seed, position)."""
    state = _mix(seeds.astype(np.uint64))
    state = _mix(state ^ (positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)))
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> Draws:
    """Draw from `logits` [B, V]; `positions` [B] counts the tokens each request has already produced."""
    logits = logits.float()
    seeds = np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], np.uint64)
    uniform = torch.from_numpy(uniforms(seeds, np.array(positions, np.int64))).to(logits.device)
    temperatures = [p.temperature or 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    truncated = [i for i, p in enumerate(params) if p.is_truncated]
    if not truncated:
        return _draw_whole(logits, params, uniform)
    if len(truncated) == len(params):
        return _draw_truncated(logits, params, uniform)
    whole = [i for i, p in enumerate(params) if not p.is_truncated]
    parts = {}
    for rows, part in ((whole, _draw_whole), (truncated, _draw_truncated)):
        drawn = part(logits[rows], [params[i] for i in rows], uniform[rows])
        parts |= {row: (drawn, i) for i, row in enumerate(rows)}
    fields = Draws.__slots__
    order = [parts[i] for i in range(len(params))]
    return Draws(**{f: [getattr(drawn, f)[i] for drawn, i in order] for f in fields})


def _draw_whole(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> Draws:
    """Draw from the whole vocabulary."""
    logprobs = torch.log_softmax(logits, dim=-1)
    token_ids = _invert(logprobs.exp(), uniform)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    if greedy:
        token_ids[greedy] = logprobs[greedy].argmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    num_head = min(max(p.num_logprobs for p in params), logits.shape[-1])
    head_logprobs, head_ids = torch.topk(logprobs, num_head, dim=-1)
    ranks = _ranks(logprobs, chosen, head_ids == token_ids[:, None])
    return Draws(
        token_ids.tolist(), _rounded(chosen[:, 0]), ranks.tolist(), head_ids.tolist(), _rounded(head_logprobs),
        [None] * len(params),
    )  # fmt: skip


def _draw_truncated(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> Draws:
    """Draw from the candidates that min-p, top-k and top-p leave, in rank order [B, C]."""
    vocabulary, device = logits.shape[-1], logits.device
    limits = [min(p.top_k or vocabulary, vocabulary) for p in params]
    ranked, ids = torch.topk(logits, max(limits), dim=-1)
    ranked = ranked.double()  # the cut at top-p is a comparison of sums: float32 would move it
    rank = torch.arange(ranked.shape[1], device=device)
    keep = rank < torch.tensor(limits, device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)[:, None]
    keep &= ranked >= ranked[:, :1] + min_p.log()  # p >= min_p * p_max; log 0 = -inf keeps all
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    probabilities = torch.softmax(ranked.masked_fill(~keep, -torch.inf), dim=-1)
    keep &= (probabilities.cumsum(dim=-1) - probabilities < top_p) | (rank == 0)
    logprobs = torch.log_softmax(ranked.masked_fill(~keep, -torch.inf), dim=-1)
    index = _invert(logprobs.exp(), uniform)[:, None]
    num_head = min(max(p.num_logprobs for p in params), ranked.shape[1])
    sizes, ids_list = keep.sum(dim=-1).tolist(), ids.tolist()
    return Draws(
        ids.gather(1, index)[:, 0].tolist(), _rounded(logprobs.gather(1, index)[:, 0]), (index[:, 0] + 1).tolist(),
        [row[:num_head] for row in ids_list], _rounded(logprobs[:, :num_head]),
        [row[:size] for row, size in zip(ids_list, sizes, strict=True)],
    )  # fmt: skip


def _ranks(logprobs: torch.Tensor, chosen: torch.Tensor, in_head: torch.Tensor) -> torch.Tensor:
    """[B] rank of the chosen token; only rows whose token is outside the head need a pass over the vocabulary."""
    ranks = in_head.int().argmax(dim=-1) + 1 if in_head.shape[1] else torch.zeros_like(chosen[:, 0], dtype=torch.int64)
    outside = (~in_head.any(dim=-1)).nonzero()[:, 0]
    if len(outside):
        ranks[outside] = (logprobs[outside] > chosen[outside]).sum(dim=-1) + 1
    return ranks


def _invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[B] first index whose cumulative probability exceeds uniform * total.

    A wide row is inverted in two levels, blocks and then one block: a float64 running sum over it all costs more than
    the softmax.
    """
    num_rows, width = probabilities.shape
    if width < 32 * _BLOCK:
        return _first_above(probabilities, uniform * probabilities.sum(dim=-1, dtype=torch.float64))[0]
    blocks = F.pad(probabilities, (0, -width % _BLOCK)).view(num_rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    block, rest = _first_above(sums, uniform * sums.sum(dim=-1))
    inside, _ = _first_above(blocks[torch.arange(num_rows, device=block.device), block], rest)
    return (block * _BLOCK + inside).clamp_max_(width - 1)


def _first_above(masses: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] first index whose running sum exceeds `target` [B], and what of the target its predecessors leave.

    Rounding may leave a target at or above the last sum: then the last index with mass is taken.
    """
    sums = masses.cumsum(dim=-1, dtype=torch.float64)
    target = torch.minimum(target, torch.nextafter(sums[:, -1], sums.new_zeros(())))
    index = torch.searchsorted(sums, target[:, None], right=True).clamp_max_(masses.shape[-1] - 1)
    before = sums.gather(1, index) - masses.gather(1, index)
    return index[:, 0], target - before[:, 0]


def _rounded(logprobs: torch.Tensor) -> list:
    """Seven decimals: below float32's own error for a log-probability, and a third of the bytes in JSON."""
    return torch.round(logprobs.double(), decimals=7).tolist()

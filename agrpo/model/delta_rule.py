"""The gated delta rule over a prefix tree (Gated Delta Networks, arXiv 2412.06464), each segment from its parent's state.

With state S [K, V] per head, S = 0 at a root, a token with query q, key k, value v, log decay g and rate b does

    S <- exp(g) S;  S <- S + k (b (v - k S))^T;  out = q S

`torch_rule` does it a chunk at a time: inside a chunk the corrections are one triangular system, and only the chunks'
states are sequential. `kernel_rule` gives each level of the tree to flash-linear-attention's kernel.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from agrpo.model.delta_plan import Chunks, DeltaPlan, Level


@functools.cache
def kernel_for(kind: str) -> Callable | None:
    """flash-linear-attention's kernel where the device `kind` is "cuda" and the package is installed, else None."""
    if kind != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def torch_rule(query, key, value, decay, rate, plan: DeltaPlan) -> torch.Tensor:
    """[N, Hk, K] queries and keys, [N, H, V] values, [N, H] log decays and rates to [N, H, V], in at least float32.

    Queries and keys are normalised here; each serves H / Hk value heads.
    """
    exact = torch.promote_types(value.dtype, torch.float32)
    share = value.shape[1] // key.shape[1]
    chunks = plan.chunks
    with torch.autocast(value.device.type, enabled=False):
        query = _unit(query.to(exact)) * query.shape[-1] ** -0.5
        query, key = (_chunked(x, chunks).repeat_interleave(share, 1) for x in (query, _unit(key.to(exact))))
        value, decay, rate = (_chunked(x.to(exact), chunks) for x in (value, decay, rate))
        out = _scan(*_inside(query, key, value, decay, rate), chunks)  # [C, H, size, V]
        return out.transpose(1, 2).flatten(0, 1)[chunks.places].to(value.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunked(x: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """[N, H, ...] to [C, H, size, ...]; padding is zero: it neither decays nor writes."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, chunks.tokens).unflatten(0, (-1, chunks.size)).transpose(1, 2)


def _inside(query, key, value, decay, rate) -> tuple[torch.Tensor, ...]:
    """What chunks need of themselves: everything but the state that they start from."""
    total = decay.cumsum(-1)  # [C, H, size]
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    scaled_key = key * rate.unsqueeze(-1)
    system = scaled_key @ key.transpose(-1, -2) * between  # its diagonal is taken as 1
    right = torch.cat([value * rate.unsqueeze(-1), scaled_key * total.exp().unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    attention = query @ key.transpose(-1, -2) * between
    from_state = query * total.exp().unsqueeze(-1)
    to_state = key * (total[..., -1:] - total).exp().unsqueeze(-1)
    return written, read, attention, from_state, to_state.transpose(-1, -2), total[..., -1].exp()[..., None, None]


def _scan(written, read, attention, from_state, to_state, kept, chunks: Chunks) -> torch.Tensor:
    """The states from wave to wave, and the output [C, H, size, V]."""
    state = written.new_zeros(chunks.waves[0], written.shape[1], read.shape[-1], written.shape[-1])
    parts = [x.split(chunks.waves) for x in (written, read, attention, from_state, to_state, kept)]
    outs = []
    for origin, own, seen, inner, outer, add, keep in zip(chunks.origins, *parts, strict=True):
        state = state if origin is None else state.index_select(0, origin)
        new = own - seen @ state
        outs.append(outer @ state + inner @ new)
        state = state * keep + add @ new
    return torch.cat(outs)


def kernel_rule(query, key, value, decay, rate, plan: DeltaPlan, kernel: Callable) -> torch.Tensor:
    """As `torch_rule`, by a kernel with the signature of fla's `chunk_gated_delta_rule`, once per level of the tree."""
    outs, state = [], None
    for level in plan.levels:
        parts = [_of_level(x, level) for x in (query, key, value, decay, rate)]
        start = None if level.origins is None else state.index_select(0, level.origins)
        out, state = kernel(
            *parts,
            initial_state=start,
            output_final_state=level is not plan.levels[-1],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=level.bounds,
        )
        outs.append(out[0])
    if len(outs) == 1:
        return outs[0]
    order = torch.cat([level.tokens for level in plan.levels])
    return torch.empty_like(value, dtype=outs[0].dtype).index_copy(0, order, torch.cat(outs))


def _of_level(x: torch.Tensor, level: Level) -> torch.Tensor:
    return (x if level.tokens is None else x.index_select(0, level.tokens))[None]


def tree_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: DeltaPlan) -> torch.Tensor:
    """Causal depthwise convolution [N, D] with weight [D, k] along each token's own path, in at least float32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    padded, weight = F.pad(x, (0, 0, 0, 1)), weight.to(exact)
    out = None if bias is None else bias.to(exact)
    for step, index in enumerate(plan.predecessors(weight.shape[1])):
        part = padded.index_select(0, index) * weight[:, -1 - step]
        out = part if out is None else out + part
    return out

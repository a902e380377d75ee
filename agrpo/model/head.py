"""The output head at positions with a loss term, chunked over tokens: [tokens, vocabulary] never exists (LOSS-14).

The backward pass recomputes each chunk of logits and accumulates the weight gradient in float32: rounding every chunk
to bfloat16 would bias it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_CHUNK_LOGITS = 1 << 24  # logits per chunk, 64 MiB in float32


@dataclass(frozen=True, slots=True)
class Scaling:
    """What turns the head's product into the logits that are sampled from (LOSS-1, LOSS-15)."""

    temperature: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(model: torch.nn.Module, temperature: float) -> Scaling:
        """The final soft cap and logit scale of the model's config, as its own head applies them."""
        config = model.config.get_text_config()
        multiplier = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return Scaling(temperature, multiplier / divisor, getattr(config, "final_logit_softcapping", None))

    def forward(self, product: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self.multiplier != 1.0:
            product *= self.multiplier
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        return product.div_(self.temperature) if self.temperature != 1.0 else product

    def backward(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """In place: gradient of the product from that of the logits."""
        if self.softcap is not None:
            grad *= 1 - (logits * (self.temperature / self.softcap)) ** 2
        return grad.mul_(self.multiplier / self.temperature)


@dataclass(frozen=True, slots=True)
class Kept:
    """Candidate sets per loss term, flat: term `terms[i]` keeps token `ids[i]`, terms ascending (SAMP-1, SAMP-7)."""

    ids: torch.Tensor  # [C] int64
    terms: torch.Tensor  # [C] int64
    offsets: tuple[int, ...]  # [M + 1] first entry of each term, on the host

    def dropped(self, first: int, last: int, vocabulary: int) -> torch.Tensor:
        """[last - first, V] true outside the candidate sets of these terms."""
        span = slice(self.offsets[first], self.offsets[last])
        dropped = torch.ones(last - first, vocabulary, dtype=torch.bool, device=self.ids.device)
        dropped[self.terms[span] - first, self.ids[span]] = False
        return dropped


def head_terms(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target_ids: torch.Tensor,
    head_ids: torch.Tensor,
    scaling: Scaling,
    kept: Kept | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the targets [M] and of `head_ids` [M, K] (-inf outside the candidate set), and the entropy [M].

    `hidden` is [M, H], `weight` [V, H]. Gradients reach hidden, weight and bias, not through the entropy (LOSS-16).
    """
    return _HeadTerms.apply(hidden, weight, bias, target_ids, head_ids.clamp(min=0), scaling, kept)


def _logits(hidden, weight, bias, scaling: Scaling) -> torch.Tensor:
    product = F.linear(hidden, weight, bias)
    return scaling.forward(product.to(torch.promote_types(product.dtype, torch.float32)))


def _chunks(terms: int, vocabulary: int) -> list[tuple[int, int]]:
    size = max(1, _CHUNK_LOGITS // vocabulary)
    return [(first, min(first + size, terms)) for first in range(0, terms, size)]


class _HeadTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target_ids, head_ids, scaling, kept):
        terms, exact = len(target_ids), torch.promote_types(hidden.dtype, torch.float32)
        logprobs, log_mass, entropy = (hidden.new_empty(terms, dtype=exact) for _ in range(3))
        head_logprobs = hidden.new_empty(head_ids.shape, dtype=exact)
        for first, last in _chunks(terms, len(weight)):
            at = slice(first, last)
            logits = _logits(hidden[at], weight, bias, scaling)
            mass = logits.logsumexp(-1)
            entropy[at] = mass - (torch.softmax(logits, -1) * logits).sum(-1)
            target = logits.gather(1, target_ids[at, None]).squeeze(1)
            if kept is not None:
                logits.masked_fill_(kept.dropped(first, last, len(weight)), -torch.inf)
                mass = logits.logsumexp(-1)
            logprobs[at], log_mass[at] = target - mass, mass
            head_logprobs[at] = logits.gather(1, head_ids[at]) - mass[:, None]
        ctx.save_for_backward(hidden, weight, bias, target_ids, head_ids, log_mass)
        ctx.scaling, ctx.kept = scaling, kept
        ctx.mark_non_differentiable(entropy)
        return logprobs, head_logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_head_logprobs, _):
        hidden, weight, bias, target_ids, head_ids, log_mass = ctx.saved_tensors
        exact, (for_hidden, for_weight, for_bias, *_) = log_mass.dtype, ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if for_bias else None
        for first, last in _chunks(len(target_ids), len(weight)):
            at = slice(first, last)
            logits = _logits(hidden[at], weight, bias, ctx.scaling)
            grad = (logits - log_mass[at, None]).exp_()
            if ctx.kept is not None:
                grad.masked_fill_(ctx.kept.dropped(first, last, len(weight)), 0.0)
            grad *= -(grad_logprobs[at] + grad_head_logprobs[at].sum(-1))[:, None]
            grad.scatter_add_(1, target_ids[at, None], grad_logprobs[at, None])
            grad.scatter_add_(1, head_ids[at], grad_head_logprobs[at])
            grad = ctx.scaling.backward(grad, logits)
            if for_bias:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if for_hidden:
                grad_hidden[at] = grad @ weight
            if for_weight:
                grad_weight += grad.T @ hidden[at]
        grad_weight = grad_weight.to(weight.dtype) if for_weight else None
        return grad_hidden, grad_weight, grad_bias.to(bias.dtype) if for_bias else None, None, None, None, None

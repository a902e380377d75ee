"""The output head at positions with a loss term, one slice of the vocabulary at a time: [tokens, vocabulary] never exists.

The backward pass makes each slice of logits again. A slice of the weight's gradient is one product over all terms, so it
is written once and rounded once: rounding the parts of a sum to bfloat16 would bias it (LOSS-14).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from types import ModuleType

import torch

from agrpo.model import head_torch
from agrpo.model.candidates import Kept
from agrpo.model.head_torch import Scaling
from agrpo.model.memory import SLICE_LOGITS

_LEAST_WIDTH = 256  # of a slice; products of narrower ones are slow


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

    `hidden` is [M, H], `weight` [V, H], of one dtype. Gradients reach hidden, weight and bias, not through the entropy
    (LOSS-16).
    """
    ids = torch.cat([target_ids[:, None], head_ids.clamp(min=0)], 1)
    return _HeadTerms.apply(hidden, weight, bias, ids, scaling, kept)


class _HeadTerms(torch.autograd.Function):
    """From hidden states to log-probs of `ids` [M, K + 1], the first apart, and entropy [M]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, scaling, kept):
        products = _Products(hidden, weight, bias)
        statistics = kernels_of(hidden).Statistics(ids, scaling, products.exact)
        kept_logits = None if kept is None else kept.ids.new_empty(len(kept.ids), dtype=products.exact)
        for first, tile, _ in products.slices():
            if kept is not None:
                kept.pick(tile, first, kept_logits)
            statistics.add(tile, first)
        logits, log_mass, entropy = statistics.result()
        if kept is not None:
            scaling.forward(kept_logits)
            log_mass = kept.log_mass(kept_logits, len(ids))
            logits = logits.masked_fill(~kept.places(ids)[1], -torch.inf)
        ctx.save_for_backward(hidden, weight, bias, ids, log_mass, kept_logits)
        ctx.scaling, ctx.kept = scaling, kept
        ctx.mark_non_differentiable(entropy)
        # Two tensors, not views of one: FSDP2 hangs its hooks on what the model's forward returns.
        return logits[:, 0] - log_mass, logits[:, 1:] - log_mass[:, None], entropy

    @staticmethod
    def backward(ctx, of_targets, of_heads, _):
        grad = torch.cat([of_targets[:, None], of_heads], 1)
        hidden, weight, bias, ids, log_mass, kept_logits = ctx.saved_tensors
        products = _Products(hidden, weight, bias, *ctx.needs_input_grad[:3])
        if ctx.kept is None:
            derivative = kernels_of(hidden).Derivative(ids, grad, log_mass, ctx.scaling, products.operand)
            for first, tile, part in products.slices():
                products.add(derivative.of(tile, first), first, part)
        else:
            values = ctx.kept.derivative(kept_logits, log_mass, ids, grad, ctx.scaling)
            for first, last in products.bounds:
                products.add_entries(first, last, ctx.kept.chunks(values, first, last))
        return *products.gradients(), None, None, None


def kernels_of(hidden: torch.Tensor) -> ModuleType:
    """The element-wise work on a slice: one Triton kernel on a GPU, a handful of torch operations elsewhere."""
    if hidden.is_cuda and hidden.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from agrpo.model import head_triton

        return head_triton
    return head_torch


class _Products:
    """The products of hidden states, weight and logits' gradient by slices of the vocabulary, all summed in `exact`.

    `operand` is the dtype that is multiplied. On a GPU that of the weight, with sums in float32; a processor has no such
    product, and its float32 product is no slower.
    """

    def __init__(self, hidden, weight, bias, for_hidden=False, for_weight=False, for_bias=False):
        self._weight, self._bias = weight, bias
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self.operand = hidden.dtype if hidden.is_cuda else self.exact
        self._hidden = hidden.to(self.operand)
        width = max(_LEAST_WIDTH, SLICE_LOGITS["cuda" if hidden.is_cuda else "cpu"] // max(len(hidden), 1))
        starts = range(0, len(weight), width)
        self.bounds = [(first, min(first + width, len(weight))) for first in starts]
        self.grad_hidden = torch.zeros_like(hidden, dtype=self.exact) if for_hidden else None
        self.grad_weight = torch.empty_like(weight) if for_weight else None
        self.grad_bias = torch.zeros_like(bias, dtype=self.exact) if for_bias else None

    def slices(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """First id, the head's product [M, w] in a buffer that the next one overwrites, and that part of the weight."""
        rows, widest = len(self._hidden), max(last - first for first, last in self.bounds)
        buffer = self._hidden.new_empty(rows * widest, dtype=self.exact)
        for first, last in self.bounds:
            part = self._weight[first:last].to(self.operand)
            tile = buffer[: rows * (last - first)].view(rows, last - first)
            if self.operand == self.exact:
                torch.mm(self._hidden, part.T, out=tile)
            else:
                torch.mm(self._hidden, part.T, out_dtype=self.exact, out=tile)
            if self._bias is not None:
                tile += self._bias[first:last]
            yield first, tile, part

    def add(self, grad: torch.Tensor, first: int, part: torch.Tensor) -> None:
        """Take in the gradient [M, w] of the slice whose weight is `part`."""
        at = slice(first, first + len(part))
        if self.grad_bias is not None:
            self.grad_bias[at] = grad.sum(0, dtype=self.exact)
        if self.grad_weight is not None and self.grad_weight.dtype == self.operand:
            torch.mm(grad.T, self._hidden, out=self.grad_weight[at])
        elif self.grad_weight is not None:
            self.grad_weight[at] = grad.T @ self._hidden
        if self.grad_hidden is not None and self.operand == self.exact:
            self.grad_hidden.addmm_(grad, part)
        elif self.grad_hidden is not None:
            torch.addmm(self.grad_hidden, grad, part, out_dtype=self.exact, out=self.grad_hidden)

    def add_entries(self, first: int, last: int, chunks: Iterable[tuple[torch.Tensor, ...]]) -> None:
        """Take in a slice's gradient that is 0 but for entries: chunks of (values, terms, ids), each [c]."""
        at = slice(first, last)
        part, grad_part = self._weight[at].to(self.exact), None
        if self.grad_weight is not None:
            grad_part = torch.zeros_like(part)
        for values, terms, ids in chunks:
            if self.grad_hidden is not None:
                self.grad_hidden.index_add_(0, terms, values[:, None] * part[ids - first])
            if grad_part is not None:
                grad_part.index_add_(0, ids - first, values[:, None] * self._hidden[terms])
            if self.grad_bias is not None:
                self.grad_bias.index_add_(0, ids, values)
        if grad_part is not None:
            self.grad_weight[at] = grad_part

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Of hidden, weight and bias, in their dtypes; None where not asked for."""
        sums = (self.grad_hidden, self.grad_weight, self.grad_bias)
        return tuple(None if x is None else x.to(self._weight.dtype) for x in sums)

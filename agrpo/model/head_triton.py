"""The element-wise work of `head_torch` as one Triton kernel per slice and direction: each logit is read once.

Tiles are [M, w] float32, one program per row. Interfaces and meaning are those of `head_torch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from agrpo.model.head_torch import LOWEST, Scaling

_BLOCK = 2048  # elements of a row that a program holds at once
_WARPS = 8


@triton.jit
def _logit(product, multiplier, softcap, inverse_temperature, HAS_CAP: tl.constexpr):
    logit = product * multiplier
    if HAS_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        logit = softcap * (2.0 * tl.sigmoid(2.0 * logit / softcap) - 1.0)
    return logit * inverse_temperature


@triton.jit
def _add(
    tile, ids, logits, peak, mass, moment, first, width, num_ids,
    multiplier, softcap, inverse_temperature, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile += row * width
    high, total, weighted = tl.load(peak + row), tl.load(mass + row), tl.load(moment + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        product = tl.load(tile + column, mask=column < width, other=0.0)
        x = _logit(product, multiplier, softcap, inverse_temperature, HAS_CAP)
        x = tl.where(column < width, x, -1e30)
        top = tl.maximum(high, tl.max(x, 0))
        drop, below = high - top, x - top
        shrink, exps = tl.exp(drop), tl.exp(below)
        weighted = (weighted + drop * total) * shrink + tl.sum(below * exps, 0)
        total = total * shrink + tl.sum(exps, 0)
        high = top
    tl.store(peak + row, high)
    tl.store(mass + row, total)
    tl.store(moment + row, weighted)
    k = tl.arange(0, IDS)
    place = tl.load(ids + row * num_ids + k, mask=k < num_ids, other=-1) - first
    is_here = (place >= 0) & (place < width)
    product = tl.load(tile + place, mask=is_here, other=0.0)
    x = _logit(product, multiplier, softcap, inverse_temperature, HAS_CAP)
    tl.store(logits + row * num_ids + k, x, mask=is_here)


@triton.jit
def _slope(product, multiplier, softcap, HAS_CAP: tl.constexpr):
    slope = 1.0 + 0.0 * product
    if HAS_CAP:
        tanh = 2.0 * tl.sigmoid(2.0 * product * multiplier / softcap) - 1.0
        slope = 1.0 - tanh * tanh
    return slope


@triton.jit
def _differentiate(
    tile, out, ids, grad, total, log_mass, first, width, num_ids,
    multiplier, softcap, inverse_temperature, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile += row * width
    out += row * width
    scale, norm = tl.load(total + row), tl.load(log_mass + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        product = tl.load(tile + column, mask=column < width, other=0.0)
        p = tl.exp(_logit(product, multiplier, softcap, inverse_temperature, HAS_CAP) - norm)
        value = scale * p * _slope(product, multiplier, softcap, HAS_CAP)
        tl.store(out + column, value.to(out.dtype.element_ty), mask=column < width)
    # The ids' own places once more and whole, so that p - 1 is rounded to the output's dtype after the difference.
    tl.debug_barrier()
    k = tl.arange(0, IDS)
    place = tl.load(ids + row * num_ids + k, mask=k < num_ids, other=-1) - first
    is_here = (place >= 0) & (place < width)
    own = tl.load(grad + row * num_ids + k, mask=k < num_ids, other=0.0)
    own = tl.sum(tl.where(place[:, None] == place[None, :], own[None, :], 0.0), 1)  # an id may be there twice
    product = tl.load(tile + place, mask=is_here, other=0.0)
    p = tl.exp(_logit(product, multiplier, softcap, inverse_temperature, HAS_CAP) - norm)
    value = (own + scale * p) * _slope(product, multiplier, softcap, HAS_CAP)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_here)


class Statistics:
    def __init__(self, ids: torch.Tensor, scaling: Scaling, dtype: torch.dtype):
        self._ids, self._options = ids.contiguous(), _options(scaling, ids)
        self._logits = torch.empty_like(self._ids, dtype=dtype)
        self._peak = torch.full_like(self._logits[:, 0], LOWEST)
        self._mass, self._moment = torch.zeros_like(self._peak), torch.zeros_like(self._peak)

    def add(self, product: torch.Tensor, first: int) -> None:
        rows, width = product.shape
        if rows:
            sums = (self._logits, self._peak, self._mass, self._moment)
            _add[(rows,)](product, self._ids, *sums, first, width, self._ids.shape[1], **self._options)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_mass = self._mass.log()
        return self._logits, self._peak + log_mass, log_mass - self._moment / self._mass


class Derivative:
    def __init__(
        self, ids: torch.Tensor, grad: torch.Tensor, log_mass: torch.Tensor, scaling: Scaling, dtype: torch.dtype
    ):
        self._ids, self._options, self._dtype = ids.contiguous(), _options(scaling, ids), dtype
        self._grad, self._log_mass, self._out = (grad * scaling.slope).contiguous(), log_mass, None
        self._total = -self._grad.sum(1)

    def of(self, product: torch.Tensor, first: int) -> torch.Tensor:
        """[M, w] of the dtype that is multiplied, in a buffer that the next slice overwrites."""
        rows, width = product.shape
        if self._out is None:
            self._out = torch.empty_like(product, dtype=self._dtype)
        out = self._out.view(-1)[: rows * width].view(rows, width)
        if rows:
            given = (self._ids, self._grad, self._total, self._log_mass)
            _differentiate[(rows,)](product, out, *given, first, width, self._ids.shape[1], **self._options)
        return out


def _options(scaling: Scaling, ids: torch.Tensor) -> dict:
    return {
        "multiplier": scaling.multiplier,
        "softcap": scaling.softcap or 1.0,
        "inverse_temperature": 1 / scaling.temperature,
        "HAS_CAP": scaling.softcap is not None,
        "BLOCK": _BLOCK,
        "IDS": triton.next_power_of_2(ids.shape[1]),
        "num_warps": _WARPS,
    }

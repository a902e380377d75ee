"""What the head does to each element of a slice of logits, in plain torch; `head_triton` is the same for a GPU.

M loss terms, K + 1 ids of each (the target first), w entries of the vocabulary from `first`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MULTIPLY_BY_SCALING = ("hyperclovax",)  # where `logits_scaling` is a factor; Granite's and MiniCPM3's is a divisor
LOWEST = -1e30  # in place of -inf, which times a mass of 0 is NaN


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
        names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
        multiplier = next((m for m in (getattr(config, name, None) for name in names) if m), 1.0)
        scale = getattr(config, "logits_scaling", None) or 1.0
        if config.model_type in _MULTIPLY_BY_SCALING:
            scale = 1 / scale
        return Scaling(temperature, multiplier / scale, getattr(config, "final_logit_softcapping", None))

    @property
    def slope(self) -> float:
        """Derivative of a logit by the product where there is no soft cap."""
        return self.multiplier / self.temperature

    def forward(self, product: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self.softcap is None:
            return product.mul_(self.slope) if self.slope != 1.0 else product
        product.mul_(self.multiplier / self.softcap).tanh_()
        return product.mul_(self.softcap / self.temperature)

    def bend(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The soft cap's share of the derivative, in place; `slope` is the rest."""
        if self.softcap is not None:
            grad *= 1 - (logits * (self.temperature / self.softcap)) ** 2
        return grad


def places(ids: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each id in the slice, and whether it is there at all."""
    column = ids - first
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


class Statistics:
    """Log-mass, entropy and the logits of `ids`, gathered slice by slice with a running maximum."""

    def __init__(self, ids: torch.Tensor, scaling: Scaling, dtype: torch.dtype):
        self._ids, self._scaling = ids, scaling
        self._logits = torch.empty_like(ids, dtype=dtype)
        self._peak = torch.full_like(self._logits[:, 0], LOWEST)
        self._mass, self._moment = torch.zeros_like(self._peak), torch.zeros_like(self._peak)
        self._spare = None

    def add(self, product: torch.Tensor, first: int) -> None:
        """Overwrites `product` [M, w]."""
        logits = self._scaling.forward(product)
        column, is_here = places(self._ids, first, logits.shape[1])
        torch.where(is_here, logits.gather(1, column), self._logits, out=self._logits)
        peak = torch.maximum(self._peak, logits.amax(1))
        drop = self._peak - peak
        # Sums of e^(x - peak) and of (x - peak) e^(x - peak): the entropy loses no digits to a common offset.
        below = logits.sub_(peak[:, None])
        spare = self._spare = torch.empty_like(below) if self._spare is None else self._spare
        exps = torch.exp(below, out=spare.view(-1)[: below.numel()].view_as(below))
        self._moment = (self._moment + drop * self._mass) * drop.exp() + below.mul_(exps).sum(1)
        self._mass = self._mass * drop.exp() + exps.sum(1)
        self._peak = peak

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits of the ids [M, K + 1], log-mass [M], entropy [M]."""
        log_mass = self._mass.log()
        return self._logits, self._peak + log_mass, log_mass - self._moment / self._mass


class Derivative:
    """From the gradient [M, K + 1] of the ids' log-probs to that of each slice of the head's product."""

    def __init__(
        self, ids: torch.Tensor, grad: torch.Tensor, log_mass: torch.Tensor, scaling: Scaling, dtype: torch.dtype
    ):
        self._ids, self._grad, self._log_mass, self._scaling = ids, grad * scaling.slope, log_mass[:, None], scaling
        self._total, self._dtype = -self._grad.sum(1, keepdim=True), dtype

    def of(self, product: torch.Tensor, first: int) -> torch.Tensor:
        """[M, w] of the dtype that is multiplied; overwrites `product` [M, w]."""
        logits = self._scaling.forward(product)
        below = logits - self._log_mass if self._scaling.softcap is not None else logits.sub_(self._log_mass)
        grad = below.exp_().mul_(self._total)
        column, is_here = places(self._ids, first, grad.shape[1])
        grad.scatter_add_(1, column, self._grad * is_here)
        return self._scaling.bend(grad, logits).to(self._dtype)

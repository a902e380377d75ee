"""Policy gradient with the importance weight of a token, of a whole answer, or of its geometric mean, bounded.

    level      weight w                        truncate            mask
    token      exp(d_t)                        min(w, upper)       w inside [lower, upper], else 0
    sequence   exp(sum of d over the answer)   (max(.., lower)     the whole answer at once for the
    geometric  exp(mean of d)                   where given)       two levels of whole answers

with d = log trainer - log sampler. Masking tokens with two bounds is IcePop's rule, masking answers by their geometric
mean that of MIS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agrpo.loss.surrogate import aggregation, inside, log_ratio, normalization, sample_log_ratio
from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms

_LARGEST_LOG = 20.0  # of a weight before its bound: the sum over a long answer overflows float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Tis:
    """Plain policy gradient with truncated or masked importance weights. Choose it to correct engine mismatch and little else."""

    level: str = setting("token", "whose weight it is", choices=("token", "sequence", "geometric"))
    action: str = setting(
        "truncate", "what happens to a weight outside the bounds: it is set to the bound, or has no policy term",
        choices=("truncate", "mask"),
    )  # fmt: skip
    upper: float = setting(2.0, "upper bound of the weight", gt=1)
    lower: float | None = setting(None, "lower bound of the weight; null = 0", ge=0, lt=1)
    aggregation: str = aggregation()
    normalization: str = normalization()

    wants_head = False

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """-w A p / p_detached [M]: its value is -w A, its gradient -w A grad log p."""
        weight = self._weight(terms)
        if self.action == "mask":
            bounded = weight.where(self._is_inside(weight), weight.new_zeros(()))
        else:
            bounded = weight.clamp(self.lower or 0.0, self.upper)
        one = (terms.trainer_logprobs - terms.trainer_logprobs.detach()).exp()
        return -bounded * terms.advantages * one

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: its own `ratio`, if its weight is `masked`, and on which side it is out of bounds."""
        weight = self._weight(terms)
        outside = ~self._is_inside(weight)
        return {
            "ratio": log_ratio(terms).detach().exp(),
            "masked": outside & (self.action == "mask"),
            "clipped_low": weight < (self.lower or 0.0),
            "clipped_high": weight > self.upper,
        }

    def _weight(self, terms: TokenTerms) -> torch.Tensor:
        if self.level == "token":
            logs = log_ratio(terms)
        else:
            logs = sample_log_ratio(terms, is_mean=self.level == "geometric")
        return logs.detach().clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()

    def _is_inside(self, weight: torch.Tensor) -> torch.Tensor:
        return inside(weight, self.lower or 0.0, self.upper)

"""CISPO: the importance weight is clipped, not the update, so that no token loses its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agrpo.loss.surrogate import aggregation, log_ratio, normalization
from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms


@dataclass(frozen=True, kw_only=True, slots=True)
class Cispo:
    """Log-likelihood weighted by a clipped constant ratio. Choose it where clipping would silence rare but decisive tokens."""

    clip_min: float = setting(0.0, "a smaller ratio weighs as this one", ge=0, lt=1)
    clip_max: float = setting(5.0, "a larger ratio weighs as this one", gt=1)
    aggregation: str = aggregation()
    normalization: str = normalization()

    wants_head = False

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """-clip(r) A log p [M] with the weight detached."""
        weight = log_ratio(terms).detach().exp().clamp(self.clip_min, self.clip_max)
        return -weight * terms.advantages * terms.trainer_logprobs

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: `ratio`, and if its weight was `clipped_low` or `clipped_high`; none is `masked`."""
        ratio = log_ratio(terms).detach().exp()
        low, high = ratio < self.clip_min, ratio > self.clip_max
        return {"ratio": ratio, "masked": low & high, "clipped_low": low, "clipped_high": high}

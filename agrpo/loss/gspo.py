"""GSPO: the clipped surrogate on the ratio of the whole answer, its tokens' geometric mean (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agrpo.loss.surrogate import aggregation, clipped, is_clipped, log_ratio, normalization, ratio_of, sample_log_ratio
from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms


@dataclass(frozen=True, kw_only=True, slots=True)
class Gspo:
    """Clipped surrogate of whole answers. Choose it for mixtures of experts, whose token ratios are noise, and long answers."""

    epsilon: float = setting(3e-4, "lower clip range of the answer's ratio", gt=0, lt=1)
    epsilon_high: float | None = setting(4e-4, "upper clip range; null = epsilon", gt=0)
    aggregation: str = aggregation("sequence")
    normalization: str = normalization()

    wants_head = False

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """-min(s A, clip(s) A) of its sample at every term [M], s = exp(mean log ratio of the sample)."""
        ratio = ratio_of(sample_log_ratio(terms, is_mean=True))
        return -clipped(ratio, terms.advantages, self.epsilon, self.high)

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: its own `ratio`, and if its sample is `clipped_low` or `clipped_high`; none is `masked`."""
        ratio, whole = log_ratio(terms).detach().exp(), sample_log_ratio(terms, is_mean=True).exp()
        marks = is_clipped(whole, terms.advantages, self.epsilon, self.high)
        return {"ratio": ratio, "masked": marks["clipped_low"] & marks["clipped_high"], **marks}

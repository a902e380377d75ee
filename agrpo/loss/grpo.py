"""The clipped surrogate on the sampler's probabilities, with implausible ratios masked (LOSS-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms


@dataclass(frozen=True, kw_only=True, slots=True)
class Grpo:
    """-1[clip_min <= r <= clip_max] min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r = trainer / sampler."""

    epsilon: float = setting(0.2, "lower clip range", gt=0, lt=1)
    epsilon_high: float | None = setting(None, "upper clip range; null = epsilon", gt=0)
    clip_min: float = setting(0.5, "a token with a smaller ratio has no policy term", ge=0, lt=1)
    clip_max: float = setting(5.0, "a token with a larger ratio has no policy term", gt=1)
    normalization: str = setting(
        "step", "divide by the trained tokens of the step or of each microbatch", choices=("step", "microbatch")
    )

    wants_head = False

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """Loss of each trained token [M]; masked tokens give 0 and stay in the denominator (LOSS-2, LOSS-3)."""
        ratio = (terms.trainer_logprobs - terms.sampler_logprobs).exp()
        inside = (ratio.detach() >= self.clip_min) & (ratio.detach() <= self.clip_max)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clipped = ratio.clamp(1 - self.epsilon, 1 + high) * terms.advantages
        surrogate = (ratio * terms.advantages).minimum(clipped)
        # Not a product with the mask: an infinite ratio times 0 is NaN.
        return -surrogate.where(inside, surrogate.new_zeros(()))

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: `ratio`, and if it is `masked`, `clipped_low`, `clipped_high` (MET-clip_ratio)."""
        ratio = (terms.trainer_logprobs.detach() - terms.sampler_logprobs).exp()
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return {
            "ratio": ratio,
            "masked": (ratio < self.clip_min) | (ratio > self.clip_max),
            "clipped_low": (ratio < 1 - self.epsilon) & (terms.advantages < 0),
            "clipped_high": (ratio > 1 + high) & (terms.advantages > 0),
        }

"""Decoupled PPO: the clip is taken around the policy at the start of the step, staleness corrected by a weight of its own.

With q the sampler, p0 the policy at the start of the step and p the one being trained (arXiv 2505.24298):
loss = -1[clip_min <= p0/q <= clip_max] (p0/q) min(r A, clip(r) A), r = p/p0, the weight p0/q without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agrpo.loss.surrogate import ClippedSurrogate, clipped, inside, is_clipped, log_ratio, ratio_of
from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoupled(ClippedSurrogate):
    """PPO clipped around the step's first policy. Choose it for old samples, or for several updates per step."""

    epsilon: float = setting(0.2, "lower clip range around the proximal policy", gt=0, lt=1)
    clip_min: float = setting(0.0, "a token with a smaller weight proximal / sampler has no policy term", ge=0, lt=1)
    clip_max: float = setting(5.0, "a token with a larger weight has no policy term", gt=1)
    proximal: str = setting(
        "recompute",
        "the proximal policy: the one at the start of the step, or interpolated one version before the trained one",
        choices=("recompute", "interpolate"),
    )
    updates_per_step: int = setting(1, "optimizer updates per step, each on an equal part of its microbatches", ge=1)

    @property
    def wants_proximal(self) -> bool:
        """Whether a forward before the first update is needed: with one update the trained policy is the step's first."""
        return self.proximal == "recompute" and self.updates_per_step > 1

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """Loss of each trained token [M]."""
        proximal = self._proximal(terms)
        weight = ratio_of(proximal - terms.sampler_logprobs)
        ratio = ratio_of(terms.trainer_logprobs - proximal)
        surrogate = weight * clipped(ratio, terms.advantages, self.epsilon, self.high, self.dual_clip)
        return -surrogate.where(inside(weight, self.clip_min, self.clip_max), surrogate.new_zeros(()))

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: `ratio` to the sampler, `masked` by the weight, `clipped_*` around the proximal policy."""
        proximal = self._proximal(terms)
        weight, ratio = (proximal - terms.sampler_logprobs).exp(), (terms.trainer_logprobs - proximal).exp()
        return {
            "ratio": log_ratio(terms).detach().exp(),
            "masked": ~inside(weight, self.clip_min, self.clip_max),
            **is_clipped(ratio, terms.advantages, self.epsilon, self.high),
        }

    def _proximal(self, terms: TokenTerms) -> torch.Tensor:
        """[M] log-probs without gradient.

        Interpolated: log q + a (log p - log q) with a = (v - 1 - v_q) / (v - v_q) in [0, 1] for trained version v and
        sampler version v_q: 0 at age 1, 1/2 at age 2. A token of age 0 has the trained policy itself.
        """
        trained = terms.trainer_logprobs.detach()
        if self.proximal == "recompute":
            return trained if terms.proximal_logprobs is None else terms.proximal_logprobs
        age = (terms.version - terms.versions).to(trained.dtype)
        share = ((age - 1) / age.clamp(min=1)).clamp(0, 1).where(age > 0, age.new_ones(()))
        # Not a product with the difference: an infinite log-prob of the sampler times 0 is NaN.
        return trained.where(share == 1, terms.sampler_logprobs + share * log_ratio(terms).detach())

    def problems(self, config: Any) -> list[str]:
        count = config.run.gradient_accumulation_steps
        if count % self.updates_per_step == 0:
            return []
        return [
            f"loss.updates_per_step must divide run.gradient_accumulation_steps={count}, got {self.updates_per_step}: every "
            "update needs the same number of microbatches"
        ]

"""Importance-weighted policy gradient minus its expectation under the sampler, estimated at every position (LOSS-6).

With f(r) = r inside [clip_min, clip_max] and 0 outside, the gradient of a term is
-A (f(r_o) grad log p(o) - E over v of q of f(r_v) grad log p(v)). The sampler lists only its most likely tokens, the
head. Leaving the others out biases the gradient; here they are modelled as q_v = alpha p_v, and since the sum of
p_v grad log p_v over all v is 0, only coefficients at head tokens remain (LOSS-11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agrpo.loss.surrogate import aggregation, inside, log_ratio, normalization
from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms

_FLOOR = 1e-6  # least tail mass of either distribution: float32 log-probs resolve no less


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreCentering:
    """Score-centred policy gradient; the epsilons only define the clip metrics. Choose it first: stale samples add no bias to it on average."""

    epsilon: float = setting(0.2, "lower bound of the clip metrics", gt=0, lt=1)
    epsilon_high: float | None = setting(None, "upper bound of the clip metrics; null = epsilon", gt=0)
    clip_min: float = setting(0.5, "a token with a smaller ratio has no policy term", ge=0, lt=1)
    clip_max: float = setting(5.0, "a token with a larger ratio has no policy term", gt=1)
    centering_tail: str = setting(
        "proportional",
        "model of the tokens outside the head; none = head only, biased",
        choices=("proportional", "none"),
    )
    aggregation: str = aggregation()
    normalization: str = normalization()

    wants_head = True

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """Loss of each trained token [M]: a surrogate with the exact gradient; ratios and coefficients are detached."""
        ratio = log_ratio(terms).detach().exp()
        present, coefficients = self._coefficients(terms)
        # Absent tokens have log-prob -inf, and -inf times a coefficient of 0 is NaN: they are replaced.
        head = terms.head_trainer_logprobs.where(present, terms.head_trainer_logprobs.new_zeros(()))
        centre = (coefficients * head).sum(-1)
        return -terms.advantages * (self._band(ratio) * terms.trainer_logprobs - centre)

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: `ratio`, `masked`, `clipped_low`, `clipped_high`, `sampler_mass`, `tail_scale`.

        The clip counts ignore the sign of the advantage: nothing is clipped here (MET-clip_ratio).
        """
        ratio = log_ratio(terms).detach().exp()
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        present, _, sampler, trainer = self._head(terms)
        figures = {
            "ratio": ratio,
            "masked": (ratio < self.clip_min) | (ratio > self.clip_max),
            "clipped_low": ratio < 1 - self.epsilon,
            "clipped_high": ratio > 1 + high,
            "sampler_mass": sampler.sum(-1),
        }
        if self.centering_tail == "proportional":
            scale = _tail_scale(sampler, trainer).masked_fill(_is_exact(present, terms), 1.0)
            figures["tail_scale"] = scale.squeeze(-1)
        return figures

    def _band(self, ratio: torch.Tensor) -> torch.Tensor:
        """f(r): the ratio inside the range of LOSS-2, else 0."""
        return ratio.where(inside(ratio, self.clip_min, self.clip_max), ratio.new_zeros(()))

    def _head(self, terms: TokenTerms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Presence, ratios, and sampler's and trainer's probabilities of the head, each [M, K], 0 where absent."""
        log_q, log_p = terms.head_sampler_logprobs, terms.head_trainer_logprobs.detach()
        present = log_q.isfinite() & log_p.isfinite()
        ratio = (log_p - log_q).where(present, log_p.new_zeros(())).exp()
        sampler, trainer = (x.exp().where(present, x.new_zeros(())) for x in (log_q, log_p))
        return present, ratio, sampler, trainer

    def _coefficients(self, terms: TokenTerms) -> tuple[torch.Tensor, torch.Tensor]:
        """Presence of the head tokens and their factors of grad log p(v), each [M, K] (LOSS-8, LOSS-11)."""
        present, ratio, sampler, trainer = self._head(terms)
        coefficients = sampler * self._band(ratio)
        if self.centering_tail == "none":
            return present, coefficients
        scale = _tail_scale(sampler, trainer)
        tail = scale * self._band(1 / scale) * trainer
        return present, coefficients - tail.masked_fill(_is_exact(present, terms), 0.0)


def _is_exact(present: torch.Tensor, terms: TokenTerms) -> torch.Tensor:
    """[M, 1] where the head lists the whole candidate set, so that there is no tail to model (SAMP-9)."""
    if terms.candidate_counts is None:
        return present.new_zeros(len(present), 1)
    return present.sum(-1, keepdim=True) >= terms.candidate_counts[:, None]


def _tail_scale(sampler: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """alpha [M, 1]: the sampler's mass outside the head relative to the trainer's."""
    outside_q = (1 - sampler.sum(-1, keepdim=True)).clamp(min=_FLOOR)
    outside_p = (1 - trainer.sum(-1, keepdim=True)).clamp(min=_FLOOR)
    return outside_q / outside_p

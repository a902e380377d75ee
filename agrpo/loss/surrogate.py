"""What several objectives share: the clipped surrogate, ratios of whole samples, and the settings every loss has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agrpo.schema import setting

if TYPE_CHECKING:
    import torch

    from agrpo.model.terms import TokenTerms

AGGREGATIONS = ("token", "sequence", "prompt")
_LARGEST_LOG = 80.0  # of a ratio; exp of more than 88.7 is infinite in float32


def aggregation(default: str = "token") -> str:
    """The setting `aggregation`; the trainer turns it into exact shares of the whole step (`agrpo.train.shares`)."""
    return setting(
        default,
        "what counts equally: each trained token, each sample (the mean over its tokens), or each prompt (the mean over "
        "the tokens of its samples)",
        choices=AGGREGATIONS,
    )


def normalization() -> str:
    return setting(
        "step",
        "the sum is divided over the whole step, or over each microbatch with the mean taken over these",
        choices=("step", "microbatch"),
    )


def log_ratio(terms: TokenTerms) -> torch.Tensor:
    """log trainer - log sampler [M] with gradient."""
    return terms.trainer_logprobs - terms.sampler_logprobs


def ratio_of(logs: torch.Tensor) -> torch.Tensor:
    """exp [M], finite: backward through an infinite ratio is NaN also for a token whose term is then left out."""
    return logs.clamp(max=_LARGEST_LOG).exp()


def sums_per_sample(values: torch.Tensor, terms: TokenTerms) -> torch.Tensor:
    """[M] to [samples]; reads no number back from the device."""
    return values.new_zeros(terms.num_samples).index_add(0, terms.sample_index, values)


def sample_log_ratio(terms: TokenTerms, is_mean: bool) -> torch.Tensor:
    """Mean or sum of `log_ratio` over the trained tokens of each term's sample, [M] with gradient."""
    ratios = log_ratio(terms)
    sums = sums_per_sample(ratios, terms)
    if is_mean:
        sums = sums / sums_per_sample(ratios.detach().new_ones(ratios.shape), terms).clamp(min=1)
    return sums[terms.sample_index]


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None = None
) -> torch.Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A) [M]; with `dual_clip` c and A < 0 at least c A."""
    surrogate = (ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return surrogate
    return surrogate.where(advantages >= 0, surrogate.maximum(dual_clip * advantages))


def inside(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """low <= value <= high of the detached values."""
    return (values.detach() >= low) & (values.detach() <= high)


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> dict[str, torch.Tensor]:
    """`clipped_low` and `clipped_high` [M]: where the clip takes the gradient away (MET-clip_ratio)."""
    ratio = ratio.detach()
    return {
        "clipped_low": (ratio < 1 - low) & (advantages < 0),
        "clipped_high": (ratio > 1 + high) & (advantages > 0),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedSurrogate:
    """-1[clip_min <= r <= clip_max] min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r = trainer / sampler."""

    epsilon: float = setting(0.2, "lower clip range", gt=0, lt=1)
    epsilon_high: float | None = setting(None, "upper clip range; null = epsilon", gt=0)
    dual_clip: float | None = setting(
        None, "with a negative advantage the ratio counts at most so much; null = no such bound", gt=1
    )
    clip_min: float = setting(0.5, "a token with a smaller ratio has no policy term", ge=0, lt=1)
    clip_max: float = setting(5.0, "a token with a larger ratio has no policy term", gt=1)
    aggregation: str = aggregation()
    normalization: str = normalization()

    wants_head = False

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(self, terms: TokenTerms) -> torch.Tensor:
        """Loss of each trained token [M]; masked tokens give 0 and stay in the denominator (LOSS-2, LOSS-3)."""
        ratio = ratio_of(log_ratio(terms))
        surrogate = clipped(ratio, terms.advantages, self.epsilon, self.high, self.dual_clip)
        return -surrogate.where(inside(ratio, self.clip_min, self.clip_max), surrogate.new_zeros(()))

    def statistics(self, terms: TokenTerms) -> dict[str, torch.Tensor]:
        """Per trained token [M]: `ratio`, and if it is `masked`, `clipped_low`, `clipped_high` (MET-clip_ratio)."""
        ratio = log_ratio(terms).detach().exp()
        return {
            "ratio": ratio,
            "masked": ~inside(ratio, self.clip_min, self.clip_max),
            **is_clipped(ratio, terms.advantages, self.epsilon, self.high),
        }

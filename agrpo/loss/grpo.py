"""The clipped surrogate on the sampler's probabilities, with implausible ratios masked (LOSS-4)."""

from __future__ import annotations

from dataclasses import dataclass

from agrpo.loss.surrogate import ClippedSurrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class Grpo(ClippedSurrogate):
    """Clipped surrogate, optionally asymmetric or dual. Choose it as the well-known baseline, or where the server lists no head log-probs."""

"""DAPO's objective: more room upwards, and every token of the step with equal weight (arXiv 2503.14476).

Its other two parts are settings elsewhere: groups with equal rewards are dropped by default, and the penalty on answers
that come close to the length limit is `advantage.overlong`.
"""

from __future__ import annotations

from dataclasses import dataclass

from agrpo.loss.surrogate import ClippedSurrogate
from agrpo.schema import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Dapo(ClippedSurrogate):
    """Clipped surrogate with a wider upper range. Choose it where entropy collapses and rare good tokens should be able to grow."""

    epsilon_high: float | None = setting(0.28, "upper clip range; null = epsilon", gt=0)

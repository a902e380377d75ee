"""Dr. GRPO: each answer's sum is divided by a constant, so that length has no influence (arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agrpo.loss.surrogate import ClippedSurrogate
from agrpo.schema import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class DrGrpo(ClippedSurrogate):
    """Clipped surrogate without length and difficulty bias. Choose it where wrong answers grow longer and longer."""

    aggregation: str = setting(
        "constant", "sum over a sample's tokens divided by `length`, mean over samples", choices=("constant",)
    )
    length: int | None = setting(None, "tokens that divide a sample's sum; null = sampler.max_completion_length", ge=1)

    def problems(self, config: Any) -> list[str]:
        """The other half of the method is an advantage that is not divided by the group's deviation."""
        if config.advantage.std_level is None:
            return []
        return [
            f"advantage.std_level must be null with this loss, got {config.advantage.std_level}: dividing by the standard "
            "deviation brings back the bias it removes"
        ]

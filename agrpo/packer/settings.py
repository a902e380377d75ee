"""The settings both packers have: what they mean together with the rest of the configuration."""

from __future__ import annotations

from typing import Any

from agrpo.packer.cost import Cost


def budget_problems(token_budget: int | None, config: Any) -> list[str]:
    """One line if rows of `token_budget` tokens could not hold the longest answer (COMPAT-29)."""
    longest = config.sampler.max_completion_length
    if token_budget is None or longest is None or token_budget >= longest:
        return []
    return [
        f"packer.token_budget must be at least sampler.max_completion_length ({longest}), got {token_budget}; "
        f"raise it, or set it to null for the server's max_model_len"
    ]


def row_cost(linear_cost: float | None, model_cost: Cost) -> Cost:
    """The cost with `linear_cost` context tokens per token, or the model's own where it is null."""
    return model_cost if linear_cost is None else Cost(linear=linear_cost, attention=1.0)

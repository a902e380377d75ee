"""Padding-free packing: every sample is forwarded whole, nothing is shared (PACK-23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agrpo.packer.cost import Cost
from agrpo.packer.planner import Planner
from agrpo.packer.settings import budget_problems, row_cost
from agrpo.packer.trie import Chains
from agrpo.schema import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Padding-free packing: every sample is forwarded whole, nothing is shared (PACK-23)."""

    token_budget: int | None = setting(
        None, "tokens, and loss terms, that a row may hold; null = the server's max_model_len", ge=1
    )
    linear_cost: float | None = setting(
        None, "cost of one token's matrix products, in context tokens attended to; null = from the model", ge=0
    )

    def problems(self, config: Any) -> list[str]:
        """Refuses a budget that no complete answer fits (COMPAT-29)."""
        return budget_problems(self.token_budget, config)

    def planner(self, num_rows: int, token_budget: int, cost: Cost, microbatches_per_step: int) -> Planner:
        """A planner with this component's settings; `token_budget` and `cost` stand in where they are null."""
        budget = token_budget if self.token_budget is None else self.token_budget
        return Planner(Chains, num_rows, budget, row_cost(self.linear_cost, cost), microbatches_per_step)

"""A rollout loop that leaves out prompts which the policy has solved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agrpo.rollout import RolloutGroup, RolloutLoop


class Curriculum(RolloutLoop):
    """A prompt is skipped while its last pass rate is at or above the cap; every few epochs all are asked again."""

    @dataclass
    class Config:
        pass_rate_cap: float = 0.9
        look_again_every: int = 4  # epochs; the first of each such stretch asks everything

    async def setup(self) -> None:
        self.pass_rates: dict[int, float] = {}

    def filter_prompt(self, row_index: int, row: dict, epoch: int) -> bool:
        is_look = epoch % self.config.look_again_every == 0
        return is_look or self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
        return super().compute_advantages(group)

    def state_dict(self) -> dict[int, float]:
        return self.pass_rates

    def load_state_dict(self, state: dict[int, float]) -> None:
        self.pass_rates = state

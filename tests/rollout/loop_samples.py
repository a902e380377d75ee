"""Loops, and things that are none, for `rollout.loop`."""

from dataclasses import dataclass

import numpy as np

from agrpo.rollout import RolloutLoop


# As in the documentation of TRL's asynchronous GRPO, but for the imports and the trainer.
@dataclass
class CurriculumConfig:
    pass_rate_cap: float = 0.9


class CurriculumRolloutLoop(RolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    async def setup(self):
        self.pass_rates = {}

    def compute_advantages(self, group):
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
        return super().compute_advantages(group)


class Typed(CurriculumRolloutLoop):
    Config = CurriculumConfig

    def state_dict(self):
        return {"rates": self.pass_rates, "newest": np.float32(0.5)}

    def load_state_dict(self, state):
        self.pass_rates = state["rates"]


class OneTurn(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        return await super().generate_one(prompt, tools, group_id)


class NeedsArgument(RolloutLoop):
    def __init__(self, judge):
        self.judge = judge


class NotAsync(RolloutLoop):
    def setup(self):
        pass


class AsyncFilter(RolloutLoop):
    async def filter_prompt(self, row_index, row, epoch):
        return True


class OddConfig(RolloutLoop):
    Config = dict


class Unrelated:
    pass


def local():
    class Local(RolloutLoop):
        pass

    return Local


Hidden = local()
anonymous = lambda: RolloutLoop()  # noqa: E731

"""Rollouts that fail by themselves, and a server's answers that do: 10 % raise, 5 % never end, 5 % get rubbish."""

import asyncio
import random

from agrpo.rollout import RolloutLoop


class Faulty(RolloutLoop):
    """One rollout in ten raises, one in twenty never ends."""

    async def setup(self) -> None:
        self.random, self.num_raised, self.num_hung = random.Random(5), 0, 0

    async def generate_one(self, prompt, tools, group_id):
        fate = self.random.random()
        if fate < 0.10:
            self.num_raised += 1
            raise ValueError("injected")
        if fate < 0.15:
            self.num_hung += 1
            await asyncio.Event().wait()
        return await super().generate_one(prompt, tools, group_id)


def rubbish(seed=7):
    rng = random.Random(seed)
    while True:
        yield "malformed" if rng.random() < 0.05 / 0.85 else None

"""A counter that the model moves to a target it is told; the environment makes the task and gives the reward."""

from __future__ import annotations

import random
from typing import Any


class IncrementEnv:
    """`reset` draws a target from 1 to 6; a rollout is worth 1.0 where the counter ends on it, else 0.0."""

    def reset(self, group_seed: int | None = None, **columns: Any) -> str:
        """The task. With `group_seed` all members of a group get the same one, so that they can be compared."""
        self.counter = 0
        self.target = random.Random(group_seed).randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

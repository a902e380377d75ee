"""The second environment beside the counter: lamps of several colours, one of which is to be lit alone."""

from __future__ import annotations

import random
from typing import Any

COLOURS = ("red", "green", "blue", "white", "pink", "black")


class LampsEnv:
    """`reset` names a colour; a rollout is worth 1.0 where exactly that lamp is lit, else 0.0."""

    def reset(self, group_seed: int | None = None, **columns: Any) -> str:
        """The task. With `group_seed` all members of a group get the same one, so that they can be compared."""
        self.lit: list[str] = []
        self.wanted = random.Random(group_seed).choice(COLOURS)
        return f"Light the {self.wanted} lamp."

    def get_reward(self) -> float:
        return float(self.lit == [self.wanted])

    def press(self, colour: str) -> str:
        """Press the switch of one lamp; pressed again, it goes out.

        Args:
            colour: Which lamp.

        Returns:
            The colours that are lit now.
        """
        if colour not in COLOURS:
            raise ValueError(f"no lamp is {colour}; there are {', '.join(COLOURS)}")
        self.lit = [c for c in self.lit if c != colour] if colour in self.lit else [*self.lit, colour]
        return " ".join(self.lit)

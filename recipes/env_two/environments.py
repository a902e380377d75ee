"""The second environment beside the counter: a desk with a calculator, where the product of two numbers is to be found."""

from __future__ import annotations

import random
from typing import Any

from agrpo.recipes.tools_calculator.tools import calculate


class ProductEnv:
    """`reset` asks for a product; a rollout is worth 1.0 where the calculator last showed it, else 0.0."""

    def reset(self, group_seed: int | None = None, **columns: Any) -> str:
        """The task. With `group_seed` all members of a group get the same one, so that they can be compared."""
        rng = random.Random(group_seed)
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        self.product, self.shown = a * b, 0
        return f"What is {a} * {b}?"

    def get_reward(self) -> float:
        return float(self.shown == self.product)

    def calculate(self, expression: str) -> int:
        """Work out a sum, a difference or a product of two numbers.

        Args:
            expression: Two numbers with one of + - * between them, such as 12 * 34.

        Returns:
            The result.
        """
        self.shown = calculate(expression)
        return self.shown

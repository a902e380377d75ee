"""The calculator the model may call."""

from __future__ import annotations

import re

EXPRESSION = re.compile(r"\s*(\d{1,4})\s*([-+*])\s*(\d{1,4})\s*")


def calculate(expression: str) -> int:
    """Work out a sum, a difference or a product of two numbers.

    Args:
        expression: Two numbers with one of + - * between them, such as 12 * 34.

    Returns:
        The result.
    """
    match = EXPRESSION.fullmatch(expression)
    if match is None:
        raise ValueError("write two numbers with one of + - * between them")
    a, b = int(match[1]), int(match[3])
    return {"+": a + b, "-": a - b, "*": a * b}[match[2]]

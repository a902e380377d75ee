"""What a reward function is given and what it must give back (REW-2 to REW-5). Standard library only: workers import it."""

from __future__ import annotations

import array
import math
import numbers
from dataclasses import dataclass
from typing import Any

from agrpo.errors import ContractError

STANDARD = ("prompts", "completions", "completion_ids")
NOT_PASSED = ("prompt", "completion", "completion_ids")  # columns that would repeat a standard argument (REW-3)


class ScoreError(Exception):
    """A reward function raised, hung or died: the group cannot be scored (REW-14). `reason` is raised, timeout or died."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason, self.text = reason, text


@dataclass(frozen=True, slots=True)
class Request:
    """One group as it travels to a worker: the row once, each usable rollout's answer."""

    messages: list[dict[str, Any]]
    columns: dict[str, Any]
    completions: list[list[dict[str, Any]]]  # [n]
    completion_ids: list[array.array]  # [n] int32 ids; compact, and needs no numpy in the worker
    own_prompts: list[list[dict[str, Any]]] | None = None  # [n], where environments changed the row's messages


def keywords(request: Request) -> dict[str, list]:
    """Keyword arguments of every function, one entry per rollout: columns {"a": 7} of 2 rollouts gives a=[7, 7]."""
    n = len(request.completions)
    extra = {name: [value] * n for name, value in request.columns.items() if name not in NOT_PASSED}
    return {
        **extra,
        "prompts": list(request.own_prompts or [request.messages] * n),
        "completions": list(request.completions),
        "completion_ids": [ids.tolist() for ids in request.completion_ids],
    }


def checked(name: str, values: Any, n: int) -> list[float | None]:
    """The result of function `name` for `n` rollouts as floats and None, or ContractError naming it (REW-5)."""
    if not isinstance(values, list):
        raise ContractError(
            f"reward function {name} must return a list of {n} numbers or None, got {type(values).__name__}"
        )
    if len(values) != n:
        raise ContractError(f"reward function {name} must return {n} values, one per completion, got {len(values)}")
    return [_number(name, index, value) for index, value in enumerate(values)]


def _number(name: str, index: int, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ContractError(
            f"reward function {name} returned {value!r} ({type(value).__name__}) for completion {index}; "
            "allowed: real numbers and None"
        )
    if not math.isfinite(value):
        raise ContractError(
            f"reward function {name} returned {value!r} for completion {index}; allowed: finite numbers, and None for not scored"
        )
    return float(value)

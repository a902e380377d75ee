"""How a component declares its settings: default, meaning and allowed values in one place, next to the field.

Standard library only, so that receivers running inside a server's own environment can import it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: tuple[Any, ...] | None = None,
    factory: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field with its meaning and allowed range; None values skip the range check.

    `epsilon: float = setting(0.2, "lower clip range", gt=0, lt=1)`
    """
    bounds = {k: v for k, v in {"gt": gt, "ge": ge, "lt": lt, "le": le}.items() if v is not None}
    metadata = {"doc": doc, "bounds": bounds, "choices": choices}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def allowed(field: dataclasses.Field) -> str:
    """The allowed values of a field in words: `in (0, 1)`, `one of a, b`, `>= 1`, or empty."""
    choices, bounds = field.metadata.get("choices"), field.metadata.get("bounds") or {}
    if choices:
        return "one of " + ", ".join("null" if c is None else str(c) for c in choices)
    low = "(" if "gt" in bounds else "["
    high = ")" if "lt" in bounds else "]"
    lower, upper = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if lower is not None and upper is not None:
        return f"in {low}{lower}, {upper}{high}"
    if lower is not None:
        return f"{'>' if low == '(' else '>='} {lower}"
    if upper is not None:
        return f"{'<' if high == ')' else '<='} {upper}"
    return ""


def violations(instance: Any, prefix: str) -> list[str]:
    """One line per field of a dataclass instance outside its declared range: `loss.epsilon must be in (0, 1), got 1.5`."""
    lines = []
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            lines += violations(value, f"{prefix}.{field.name}")
        elif value is not None and not _inside(value, field):
            lines.append(f"{prefix}.{field.name} must be {allowed(field)}, got {value!r}")
    return lines


def _inside(value: Any, field: dataclasses.Field) -> bool:
    choices, bounds = field.metadata.get("choices"), field.metadata.get("bounds") or {}
    if choices and value not in choices:
        return False
    if not bounds:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return False
    return (
        value > bounds.get("gt", -math.inf) or "gt" not in bounds
    ) and value >= bounds.get("ge", -math.inf) and (
        value < bounds.get("lt", math.inf) or "lt" not in bounds
    ) and value <= bounds.get("le", math.inf)

"""The events of one logging window and their reduction to one record (LOG-1 to LOG-5).

Every value is kept as (total, weight): numerator and denominator of a ratio, sum and count of a mean; the other
reductions use the first number only. Windows of several processes merge exactly, because nothing is averaged before
the record is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from agrpo.metrics.names import declared, positions, reduction_of

_ADDED = frozenset(("ratio", "sum", "mean"))


class Window:
    """Collects metric events: `add` and `merge` as things happen, `record` once per window.

    `add("reward", 3.0, 8)` and `add("reward", 5.0, 8)` give 8/16 = 0.5: sum over sum, not a mean of means.
    `strict=True` refuses names that are not declared.
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self._values: dict[str, list[float]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one event: numerator and denominator of a ratio, else a value. NaN values are no events."""
        if self.strict and declared(name) is None:
            raise ValueError(f"metric {name} is not declared in agrpo/metrics/names.py")
        if value == value and weight == weight:  # the quickest test for NaN; this is called for every event
            self._join(name, float(value), float(weight))

    def _join(self, name: str, value: float, weight: float) -> None:
        held = self._values.get(name)
        if held is None:
            self._values[name] = [value, weight]
        elif (reduction := reduction_of(name)) in _ADDED:
            held[0] += value
            held[1] += weight
        elif reduction == "last":
            held[:] = value, weight
        else:
            held[:] = (max if reduction == "max" else min)(held[0], value), weight

    def merge(self, other: Window | Mapping) -> None:
        """Add the events of another window, or of its wire form; its `last` values count as later."""
        values = other._values if isinstance(other, Window) else other
        for name, (value, weight) in values.items():
            self._join(name, float(value), float(weight))

    def take(self, start: str) -> Window:
        """A window of the metrics whose names begin with `start`; they leave this one."""
        taken = Window()
        taken._values = {name: self._values.pop(name) for name in list(self._values) if name.startswith(start)}
        return taken

    def total(self, name: str) -> float:
        """Sum of the values added under `name` in this window (0 without events)."""
        return self._values.get(name, (0.0, 0.0))[0]

    def get(self, name: str, default: float | None = None) -> float | None:
        """The reduced value of `name` so far, or `default` where the record would leave it out."""
        if name not in self._values:
            return default
        value, weight = self._values[name]
        if reduction_of(name) not in ("ratio", "mean"):
            return value
        if weight:
            return value / weight
        metric = declared(name)
        return math.nan if metric is not None and metric.is_nan_when_empty else default

    def to_wire(self) -> dict[str, list[float]]:
        """Plain numbers for a message; the window is empty afterwards."""
        wire, self._values = self._values, {}
        return wire

    @staticmethod
    def from_wire(wire: Mapping) -> Window:
        window = Window()
        window.merge(wire)
        return window

    def record(self, step: int) -> dict[str, float | int]:
        """One record: `step` and every metric with events, in the order of the table. Empties the window."""
        order = positions()

        def place(name: str) -> tuple[int, str]:
            metric = declared(name)
            return (order[metric.name] if metric else len(order), name)

        reduced = {name: self.get(name) for name in sorted(self._values, key=place)}
        self._values.clear()
        return {"step": step, **{name: value for name, value in reduced.items() if value is not None}}

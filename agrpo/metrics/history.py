"""A run's records and settings as the rules of a diagnosis read them: now, before, best, how it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RECENT = 10  # windows that "now" is the mean of, and over which a trend counts (DIAG-4)
BRIEF = 3  # windows that "best" and "latest" are the mean of


@dataclass(frozen=True, slots=True)
class History:
    """Records of `metrics.jsonl` in their order, and the tree of `config.yaml`."""

    records: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `default` where it is missing or null."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def values(self, name: str) -> list[float]:
        """The finite numbers of one metric, oldest first. Of times and rates, the first of several is left out: it holds
        the start of the run."""
        is_timed = name.startswith(("perf/", "rollout/"))
        usable = self.records[1:] if is_timed and len(self.records) > BRIEF else self.records
        found = [r[name] for r in usable if isinstance(r.get(name), int | float)]
        return [float(v) for v in found if np.isfinite(v)]

    def now(self, name: str) -> float | None:
        """Mean of the last RECENT windows; None where the metric was never logged."""
        values = self.values(name)[-RECENT:]
        return math.fsum(values) / len(values) if values else None

    def best(self, name: str) -> float | None:
        """The highest mean of BRIEF windows in a row, of half of them in a short run; None with fewer than two."""
        values = self.values(name)
        width = min(BRIEF, len(values) // 2)
        return float(np.convolve(values, np.full(width, 1 / width), mode="valid").max()) if width else None

    def latest(self, name: str) -> float | None:
        """The mean of as many windows as `best` takes, at the end."""
        values = self.values(name)
        width = min(BRIEF, len(values) // 2)
        return math.fsum(values[-width:]) / width if width else None

    def change(self, name: str) -> float | None:
        """What the straight line through the last RECENT windows rises by from the first to the last of them.

        0, 0.1, ..., 0.9 gives 0.9. None with fewer than RECENT windows.
        """
        values = self.values(name)[-RECENT:]
        if len(values) < RECENT:
            return None
        return float(np.polyfit(np.arange(RECENT), values, 1)[0] * (RECENT - 1))

    def total(self, name: str) -> float:
        """Sum over the whole run, the first record included; for counts."""
        return float(sum(r[name] for r in self.records if isinstance(r.get(name), int | float)))

    def names(self, start: str, end: str) -> list[str]:
        """What stands between `start` and `end` in the metrics of all records: rewards/{name}/mean gives the names."""
        found: dict[str, None] = {}
        for record in self.records:
            for name in record:
                if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end):
                    found[name[len(start) : len(name) - len(end)]] = None
        return list(found)

    @property
    def num_steps(self) -> int:
        return int(self.records[-1]["step"]) if self.records else 0

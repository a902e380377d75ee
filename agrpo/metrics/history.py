"""A run's records and settings as the rules of a diagnosis read them: now, before, best, how it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RECENT = 10  # windows that "now" is the mean of, and over which a trend counts (DIAG-4)
BRIEF = 3  # windows that "best" is the mean of
LIKELY, CERTAIN = 3.0, 4.5  # standard errors: of one figure, of the most extreme of many
_BLOCKS = 8  # means that do not overlap, from which their own spread is known
_NORMAL = 0.6745  # median of abs(x) of a normal x with standard deviation 1


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
        # An evaluation may have a record before that of the first step.
        first = next((i for i, r in enumerate(self.records) if "perf/step_s" in r), 0)
        usable = self.records[first + 1 :] if is_timed and len(self.records) > first + 1 else self.records
        found = [r[name] for r in usable if isinstance(r.get(name), int | float)]
        return [float(v) for v in found if np.isfinite(v)]

    def pairs(self, *names: str) -> list[tuple[float, ...]]:
        """The values of these metrics in each record that has a finite number for all of them."""
        found = [tuple(r.get(name, math.nan) for name in names) for r in self.records]
        return [values for values in found if all(isinstance(v, int | float) and math.isfinite(v) for v in values)]

    def now(self, name: str) -> float | None:
        """Mean of the last RECENT windows; None where the metric was never logged."""
        values = self.values(name)[-RECENT:]
        return math.fsum(values) / len(values) if values else None

    def best(self, name: str) -> float | None:
        """The highest mean of BRIEF windows in a row, of half of them in a short run; None with fewer than two."""
        values = self.values(name)
        width = min(BRIEF, len(values) // 2)
        return float(_means(values, width).max()) if width else None

    def fall(self, name: str, least: float) -> tuple[float, float] | None:
        """(the best mean of BRIEF or of RECENT windows, the mean of as many at the end) where the end lies lower by
        `least` and by more than noise explains; None else."""
        return _fall(self.values(name), least)

    def fall_from_start(self, name: str, least: float) -> tuple[float, float] | None:
        """(the first value, the mean of the last RECENT) where that is lower by `least` and by more than noise explains;
        None else, and with fewer than 2 RECENT. A fall within BRIEF records leaves no high mean that `fall` could find."""
        values = self.values(name)
        if len(values) < 2 * RECENT:
            return None
        first, now = values[0], math.fsum(values[-RECENT:]) / RECENT
        error = math.hypot(_noise(values), _error_of_mean(values, RECENT))
        return (first, now) if first - now >= max(least, CERTAIN * error, _rounding(values)) else None

    def has_risen(self, name: str, least: float) -> bool:
        """The same upwards: whether the end lies above the lowest means."""
        return _fall([-value for value in self.values(name)], least) is not None

    def change(self, name: str) -> float | None:
        """What the straight line through the last RECENT windows rises by from the first to the last of them.

        0, 0.1, ..., 0.9 gives 0.9. None with fewer than RECENT windows.
        """
        values = self.values(name)[-RECENT:]
        if len(values) < RECENT:
            return None
        return float(np.polyfit(np.arange(RECENT), values, 1)[0] * (RECENT - 1))

    def drift(self, name: str) -> float | None:
        """`change`, or 0 where it is within LIKELY standard errors: what noise alone gives."""
        change = self.change(name)
        if change is None:
            return None
        # of the slope: noise / sqrt(sum of (i - mean)^2) = noise * sqrt(12 / (n^3 - n))
        error = _noise(self.values(name)) * math.sqrt(12 / (RECENT**3 - RECENT)) * (RECENT - 1)
        return change if abs(change) >= max(LIKELY * error, _rounding(self.values(name))) else 0.0

    @property
    def num_ranks(self) -> int:
        return self.setting("run.num_processes", 1) * self.setting("run.num_nodes", 1)

    @property
    def records_rollouts(self) -> bool:
        """Whether `agrpo view` has something to show."""
        return self.setting("rollout.dump_to_file", False) or self.setting("logger.log_completions", False)

    @property
    def trains_equal_groups(self) -> bool:
        """Whether groups of equal rewards are trained too; they have no reward_dropped then."""
        return not self.setting("advantage.drop_zero_std", True) or not self.compares_siblings

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of equal rewards gives no gradient."""
        advantage = self.setting("advantage", {})  # a level may be null, which is none
        levels = (advantage.get("mean_level", "group"), advantage.get("std_level", "group"))
        return "group" in levels or advantage.get("rollout_time_norm", False)

    def sync_s_per_step(self) -> float | None:
        """Seconds of a weight sync, over the steps from one to the next."""
        sync_s = self.now("perf/weight_sync_s")
        return None if sync_s is None else sync_s / self.setting("sync.every_steps", 1)

    def total(self, name: str) -> float:
        """Sum over the whole run, the first record included; for counts."""
        return float(sum(r[name] for r in self.records if isinstance(r.get(name), int | float)))

    def over_steps(self, name: str) -> float:
        """Sum over all steps of what each record has the mean over its steps of."""
        total, before, longest = 0.0, 0, self.setting("logger.logging_steps", 1)
        for record in self.records:
            if isinstance(value := record.get(name), int | float):
                total += value * min(record["step"] - before, longest)  # a run that was resumed does not begin at 0
                before = record["step"]
        return total

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


def _fall(values: Sequence[float], least: float) -> tuple[float, float] | None:
    """As `History.fall`. The best of many means of nothing but noise lies well above the last, hence CERTAIN errors."""
    widths = (BRIEF, RECENT) if len(values) >= 2 * RECENT else (min(BRIEF, len(values) // 2),)
    for width in filter(None, widths):
        means = _means(values, width)
        best, now = float(means.max()), float(means[-1])
        error = math.sqrt(2) * _error_of_mean(values, width)
        if best - now >= max(least, CERTAIN * error, _rounding(values)):
            return best, now
    return None


def _rounding(values: Sequence[float]) -> float:
    """What equal values may seem to differ by once they were summed."""
    return max(1e-9 * max(map(abs, values)), 1e-300)


def _means(values: Sequence[float], width: int) -> np.ndarray:
    """Mean of each `width` neighbours."""
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of single values about their course, from the differences of neighbours.

    Their median, so that one jump does not count; at least half of their root mean square, since the median of values
    that are mostly equal is 0.
    """
    steps = np.diff(values) / math.sqrt(2)
    if not len(steps):
        return 0.0
    return float(max(np.median(np.abs(steps)) / _NORMAL, np.sqrt(np.mean(steps**2)) / 2))


def _error_of_mean(values: Sequence[float], width: int) -> float:
    """Standard error of a mean of `width` neighbours; from such means where there are many, so that noise which lasts
    over several of them counts in full."""
    error = _noise(values) / math.sqrt(width)
    blocks = np.reshape(values[len(values) % width :], (-1, width)).mean(axis=1)
    return max(error, _noise(blocks)) if len(blocks) >= _BLOCKS else error

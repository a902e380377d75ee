"""What a run's records say at a glance, kept as they come: the last steps, the reward curve, who waits for whom.

Everything has a bound, so a view that is drawn four times a second costs the same after a hundred thousand steps.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from agrpo.metrics.summary import evaluations

RECENT_STEPS = 10  # steps that the time left is estimated from
MOST_POINTS = 2000  # of the curve; above it every second one goes

VERDICTS = {
    "generation-bound": "generation-bound: training waits for samples",
    "trainer-bound": "trainer-bound: generation waits for training",
    "window-bound": "window-bound: both wait; a larger rollout.max_staleness lets them overlap",
    "balanced": "balanced: neither side waits for the other",
}

Record = Mapping[str, Any]
Points = list[tuple[float, float]]


class Glance:
    """A run's records, reduced as they come to what is shown of them."""

    def __init__(self, columns: tuple[str, ...], num_rows: int):
        """The last `num_rows` steps that have any of `columns`."""
        self._columns = columns
        self.rows: collections.deque[dict[str, Any]] = collections.deque(maxlen=num_rows)
        self.latest: dict[str, Any] = {}  # last value of every metric
        self.step: int | None = None
        self.rewards: Points = []
        self.marks: Points = []  # rewards of evaluations
        self.evaluations: dict[str, dict[str, dict[str, Any]]] = {}  # name -> before and after
        self._durations: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._every, self._num_rewards = 1, 0

    def __bool__(self) -> bool:
        return self.step is not None

    def add(self, record: Record) -> None:
        step = self.step = record["step"]
        self.latest.update({name: value for name, value in record.items() if value is not None})
        if any(record.get(key) is not None for key in self._columns):
            if self.rows and self.rows[-1]["step"] == step:  # two records of one step are one row
                self.rows[-1].update(record)
            else:
                self.rows.append(dict(record))
        if record.get("perf/step_s") is not None:
            self._durations.append(record["perf/step_s"])
        if record.get("reward") is not None:
            self._add_reward(step, record["reward"])
        for name, points in evaluations([record]).items():
            self.evaluations.setdefault(name, {"before": points["before"]})["after"] = points["after"]
            self.marks = [*self.marks, (points["after"]["step"], points["after"]["reward"])][-MOST_POINTS:]

    def _add_reward(self, step: int, reward: float) -> None:
        if self._num_rewards % self._every == 0:
            self.rewards.append((step, reward))
        self._num_rewards += 1
        if len(self.rewards) > MOST_POINTS:
            self.rewards, self._every = self.rewards[::2], self._every * 2

    def done(self, max_steps: int | None, num_epochs: float | None = None) -> float | None:
        """The share of the run that is done, by steps, else by epochs; None while unknown."""
        if self.step is not None and max_steps:
            return min(self.step / max_steps, 1.0)
        epoch = self.latest.get("epoch")
        return min(epoch / num_epochs, 1.0) if num_epochs and epoch is not None else None

    def time_left_s(self, max_steps: int | None, num_epochs: float | None = None) -> float | None:
        """Steps to go times the mean time of the recent ones; None while unknown. Of epochs, the steps to go are as many
        for each prompt as so far."""
        done = self.done(max_steps, num_epochs)
        if not done or not self._durations:
            return None
        total = max_steps or self.step / done
        return max(total - self.step, 0) * sum(self._durations) / len(self._durations)


def sides(latest: Record) -> list[tuple[str, ...]]:
    """The two sides of the run and what joins them, as rows of cells; what is not known is left out."""

    def text(pattern: str, *names: str) -> str:
        values = [latest.get(name) for name in names]
        return "" if any(v is None for v in values) else pattern.format(*values)

    wait, step = latest.get("perf/rollout_wait_s"), latest.get("perf/step_s")
    share = f" ({wait / step:.0%} of the time)" if wait is not None and step else ""
    speeds = [
        f"{short_number(value)} tokens/s" if (value := latest.get(name)) is not None else ""
        for name in ("rollout/generated_tokens_per_s", "perf/wall_clock_forwarded_tokens_per_s")
    ]
    staleness = text("mean {:.1f}, largest {:.0f} versions", "sample/staleness_mean", "sample/staleness_max")
    return [
        (
            "generation",
            speeds[0],
            text("{:.0f} of {:.0f} rollouts in flight", "rollout/concurrency", "rollout/concurrency_cap"),
        ),
        ("training", speeds[1], text("step {:.1f} s", "perf/step_s") + (f", waits {wait:.1f} s{share}" if share else "")),
        ("queue", text("{:.0f} samples", "rollout/queue_size"), f"staleness {staleness}" if staleness else ""),
    ]


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows of cells as lines of columns; `sides` says l or r for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) if s == "l" else cell.rjust(w) for cell, w, s in zip(row, widths, sides, strict=True)).rstrip()
        for row in rows
    ]


def short_number(value: float) -> str:
    """4800 -> 4.8k, 1234567 -> 1.2M, 37 -> 37."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.1f}{letter}" if abs(scaled) < 100 else f"{scaled:.0f}{letter}"
    return f"{value:.0f}"


def token_line(tokens: Mapping[str, Any]) -> str:
    """Where the generated tokens of a finished run went, in one line."""
    gone = tokens["discarded"]
    largest = sorted(gone, key=gone.get, reverse=True)[:3]
    reasons = ", ".join(f"{reason} {short_number(gone[reason])}" for reason in largest)
    first = f"{short_number(tokens['generated'])} generated"
    if tokens["restored"]:
        first += f" + {short_number(tokens['restored'])} from the checkpoint"
    parts = [f"{short_number(tokens['trained'])} trained"]
    if gone:
        parts.append(f"{short_number(sum(gone.values()))} discarded ({reasons})")
    parts += [f"{short_number(tokens['untrained'])} untrained", f"{short_number(tokens['in_flight'])} in flight"]
    return f"tokens  {first} = {' + '.join(parts)}"

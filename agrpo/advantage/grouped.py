"""Group reward -> advantage, and which groups carry no signal (ADV).

Statistics are taken over one reference reward per rollout, in float64, never over rows: a rollout that gives three rows
counts once. NaN marks a rollout that no source scored: it enters no statistic and gets advantage 0 (REW-8).

With level `batch`, statistics are those of the rollouts of one step, which are known only when the trainer has put the
step together: samples carry their rewards there, and their advantages are computed then (ADV-13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.advantage.statistics import normalise, over_tokens
from agrpo.errors import ContractError
from agrpo.schema import setting
from agrpo.types import Group, ReadyGroup, Sample

LEVELS = ("group", "batch", None)
ROLLOUT_TIME_EPS = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlong:
    """A penalty that grows linearly over the last tokens before the length limit (AREAL-WF-54)."""

    enabled: bool = setting(False, "penalise completions that come close to the length limit")
    tokens: int | None = setting(None, "length of the penalty zone before the limit; required when enabled", ge=1)
    factor: float = setting(1.0, "largest penalty, reached at the limit", gt=0)

    def penalty(self, num_generated_tokens: np.ndarray, limit: int) -> np.ndarray:
        """min(-(n - (limit - tokens)) / tokens * factor, 0): zone 4 of limit 10, n = 5, 8, 10 gives 0, -0.5, -1."""
        if not self.enabled:
            return np.zeros(len(num_generated_tokens))
        assert self.tokens is not None
        over = np.asarray(num_generated_tokens, np.float64) - (limit - self.tokens)
        return np.minimum(-over / self.tokens * self.factor, 0.0)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the advantages of one group are computed from: penalised, shifted, scaled, clipped; NaN = unscorable."""

    rows: np.ndarray  # [rows] float64
    references: np.ndarray  # [usable rollouts] float64
    row_counts: np.ndarray  # [usable rollouts] int64, consecutive rows of each rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """Rewards compared with the other rollouts of the same prompt (ADV-1)."""

    mean_level: str | None = setting("group", "what the baseline is taken over", choices=LEVELS)
    std_level: str | None = setting("group", "what the divisor is taken over", choices=LEVELS)
    leave_one_out: bool = setting(False, "leave the rollout itself out of its baseline")
    std_unbiased: bool = setting(False, "divide the variance by n - 1 instead of n")
    eps: float = setting(1e-8, "added to the standard deviation; at or below it the divisor is 1", ge=0)
    drop_zero_std: bool = setting(True, "drop groups whose rewards are all equal: they give no gradient")
    zero_std_tolerance: float = setting(1e-6, "relative spread of rewards still counted as equal; 0 = exact", ge=0)
    rollout_time_norm: bool = setting(False, "normalise rewards when the group is complete, with both levels null")
    reward_bias: float = setting(0.0, "added to every reward first")
    reward_scaling: float = setting(1.0, "factor applied to every reward after the bias; not 0")
    reward_clip: float | None = setting(None, "rewards are clipped to [-x, x] after scaling; null = off", gt=0)
    overlong: Overlong = setting(factory=Overlong, doc="penalty close to the length limit")
    token_norm: str | None = setting(None, "normalise advantages over trained tokens", choices=(None, "group", "batch"))

    @property
    def uses_group_statistics(self) -> bool:
        return "group" in (self.mean_level, self.std_level) or self.rollout_time_norm

    @property
    def needs_step(self) -> bool:
        """Advantages are known only when the step is assembled (ADV-13)."""
        return "batch" in (self.mean_level, self.std_level, self.token_norm)

    def scores(self, group: Group, max_completion_length: int, totals: np.ndarray | None = None) -> Scores:
        """`totals` [usable rollouts] are the summed rewards, by default those of the group; NaN = unscorable.

        The penalty on a row's length leaves an explicit reference alone; without one the rows of a rollout must be equal
        before and after it, else ContractError (AREAL-WF-51, 54).
        """
        usable, counts = group.usable, group.row_counts
        totals = np.array([r.reward for r in usable], np.float64) if totals is None else np.asarray(totals, np.float64)
        offsets = [np.zeros(1) if r.row_offsets is None else r.row_offsets for r in usable]
        raw = np.repeat(totals, counts) + (np.concatenate(offsets) if offsets else np.zeros(0))
        lengths = np.array([n for r in usable for n in r.generated_counts], np.int64)
        rows = raw + self.overlong.penalty(lengths, max_completion_length)
        first_row = np.cumsum(counts) - counts
        references = np.where([r.has_reference for r in usable], totals, rows[first_row]) if usable else np.zeros(0)
        for slot, (rollout, start, count) in enumerate(zip(usable, first_row, counts, strict=True)):
            own = rows[start : start + count]
            if not rollout.has_reference and count > 1 and np.ptp(own) > 0:
                raise ContractError(
                    f"group {group.group_id}: the {count} rows of usable rollout {slot} have different rewards after "
                    f"advantage.overlong ({_listed(own)}); supply an explicit rollout_reward"
                )
        return Scores(self._shaped(rows), self._shaped(references), counts)

    def _shaped(self, rewards: np.ndarray) -> np.ndarray:
        rewards = (rewards + self.reward_bias) * self.reward_scaling
        return rewards if self.reward_clip is None else np.clip(rewards, -self.reward_clip, self.reward_clip)

    def of(self, scores: Scores) -> np.ndarray:
        """[usable rollouts] float64 advantages of one group's references; 0 where unscorable."""
        return self._normalised(scores.references, None, None)

    def of_rows(self, scores: Scores) -> np.ndarray:
        """[rows] float64 advantages: rewards 1, 0, 0, 0 of one row each give 1.73205, -0.57735, -0.57735, -0.57735."""
        return self._normalised(scores.rows, scores.references, scores.row_counts)

    def _normalised(self, rewards: np.ndarray, references: np.ndarray | None, counts: np.ndarray | None) -> np.ndarray:
        parts = {"references": references, "row_counts": counts}
        if self.rollout_time_norm:
            return normalise(rewards, mean_level="group", std_level="group", eps=ROLLOUT_TIME_EPS, **parts)
        return normalise(rewards, mean_level=self.mean_level, std_level=self.std_level, **self._choices, **parts)

    @property
    def _choices(self) -> dict[str, Any]:
        return {"leave_one_out": self.leave_one_out, "unbiased": self.std_unbiased, "eps": self.eps}

    def of_tokens(self, samples: list[Sample], advantages: np.ndarray) -> np.ndarray:
        """`advantages` [samples] normalised over trained tokens if `token_norm` says so (AREAL-WF-56)."""
        if self.token_norm is None:
            return advantages
        group_ids = np.array([s.group_id for s in samples], np.int64)
        is_scored = ~np.isnan([s.reward for s in samples])
        groups = [np.flatnonzero(group_ids == g) for g in np.unique(group_ids)]
        parts = groups if self.token_norm == "group" else [np.arange(len(samples))]
        tokens = np.array([s.num_trained_tokens for s in samples], np.int64)
        found = over_tokens(np.where(is_scored, advantages, np.nan), tokens, parts, **self._choices)
        return np.where(is_scored, found, 0.0)

    def of_step(self, samples: list[Sample], group_of: Callable[[int], ReadyGroup]) -> np.ndarray:
        """[samples] advantages by the statistics of a whole step; `group_of(group_id)` holds the references.

        Level `batch` is over the rollouts with a sample in the step, level `group` over all rollouts of the group.
        """
        advantages = np.array([s.advantage for s in samples], np.float64)
        if "batch" in (self.mean_level, self.std_level):
            advantages = self._of_batch(samples, group_of)
        return self.of_tokens(samples, advantages)

    def _of_batch(self, samples: list[Sample], group_of: Callable[[int], ReadyGroup]) -> np.ndarray:
        groups = {s.group_id: group_of(s.group_id) for s in samples}
        slots = [(group_id, int(slot)) for group_id, group in groups.items() for slot in group.rollout_indices]
        place = {key: at for at, key in enumerate(slots)}
        sizes = [len(group.references) for group in groups.values()]
        references = np.concatenate([g.references for g in groups.values()])
        rollouts = [place[s.group_id, s.rollout_index] for s in samples]
        in_step = np.zeros(len(references), np.bool_)
        in_step[rollouts] = True
        # One row per sample, sorted by rollout; rollouts without a sample in the step get a row that is thrown away.
        order = np.argsort([*rollouts, *np.flatnonzero(~in_step)], kind="stable")
        rewards = np.concatenate([[s.reward for s in samples], references[~in_step]])
        counts = np.bincount(np.array(rollouts, np.int64), minlength=len(references)) + ~in_step
        found = np.empty(len(order))
        found[order] = normalise(
            rewards[order],
            mean_level=self.mean_level,
            std_level=self.std_level,
            references=references,
            row_counts=counts,
            group_sizes=np.array(sizes),
            in_batch=in_step,
            **self._choices,
        )
        return found[: len(samples)]

    def is_zero_std(self, rewards: np.ndarray) -> bool:
        """`rewards` are a group's references here and below. All scored ones equal within tolerance; true also if none is scored (ADV-4)."""
        scored = rewards[~np.isnan(rewards)]
        if not len(scored):
            return True
        return bool(np.ptp(scored) <= self.zero_std_tolerance * max(1.0, float(np.abs(scored).max())))

    def has_signal(self, rewards: np.ndarray) -> bool:
        """At least two scored rewards that differ: what `frac_reward_zero_std` counts the absence of (ADV-5)."""
        return int((~np.isnan(rewards)).sum()) >= 2 and not self.is_zero_std(rewards)

    def drop_reason(self, rewards: np.ndarray) -> str | None:
        """Why the group with these references is not trained: `under_scored`, `zero_std`, or None (ADV-5 to ADV-9)."""
        num_scored = int((~np.isnan(rewards)).sum())
        if num_scored == 0 or (self.rollout_time_norm and num_scored < len(rewards)):  # AREAL-WF-43
            return "under_scored"
        if not self.drop_zero_std or not self.uses_group_statistics:
            return None
        if num_scored < 2:
            return "under_scored"
        return "zero_std" if self.is_zero_std(rewards) else None

    def minimum_usable(self, group_size: int, explicit: int | None) -> int:
        """Fewest usable rollouts a group needs (AREAL-WF-45)."""
        if explicit is not None:
            return explicit
        return min(2, group_size) if self.uses_group_statistics or self.token_norm == "group" else 1

    def problems(self, config: Any) -> list[str]:
        return [*self._value_problems(), *self._level_problems(config), *self._overlong_problems(config)]

    def _value_problems(self) -> list[str]:
        lines = []
        if not math.isfinite(self.reward_bias):
            lines.append(f"advantage.reward_bias must be finite, got {self.reward_bias}")
        if not math.isfinite(self.reward_scaling) or self.reward_scaling == 0:
            lines.append(f"advantage.reward_scaling must be finite and not 0, got {self.reward_scaling}")
        return lines

    def _level_problems(self, config: Any) -> list[str]:
        lines = []
        size, explicit = config.rollout.group_size, config.rollout.min_usable_group_size
        group_levels = "group" in (self.mean_level, self.std_level)
        if size == 1 and self.uses_group_statistics and self.drop_zero_std:
            lines.append(
                "rollout.group_size must be >= 2, got 1: a rollout alone has no group to be compared with and would always "
                "be dropped; or set advantage.mean_level=null advantage.std_level=null"
            )
        if self.rollout_time_norm and (self.mean_level, self.std_level) != (None, None):
            lines.append(
                "advantage.rollout_time_norm=true normalises rewards already; set advantage.mean_level=null and "
                "advantage.std_level=null"
            )
        if explicit is not None and not 1 <= explicit <= size:
            lines.append(f"rollout.min_usable_group_size must be in [1, {size}] (rollout.group_size), got {explicit}")
        elif explicit is not None and explicit < 2 <= size and group_levels:
            lines.append(
                f"rollout.min_usable_group_size must be >= 2 with group statistics, got {explicit}; leave it null or set "
                "advantage.mean_level=null advantage.std_level=null"
            )
        return lines

    def _overlong_problems(self, config: Any) -> list[str]:
        if not self.overlong.enabled:
            return []
        limit, tokens = config.sampler.max_completion_length, self.overlong.tokens
        if tokens is None:
            return [f"advantage.overlong.tokens must be set when advantage.overlong.enabled=true; in [1, {limit}]"]
        if tokens > limit:
            return [f"advantage.overlong.tokens must be in [1, {limit}] (sampler.max_completion_length), got {tokens}"]
        return []


def _listed(values: np.ndarray) -> str:
    return ", ".join(f"{v:g}" for v in values)

"""Group reward -> advantage, and which groups carry no signal (ADV).

Statistics are taken over one reference reward per rollout, in float64, never over rows: a rollout that gives three samples
counts once. NaN marks a rollout that no source scored: it enters no statistic and gets advantage 0 (REW-8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.errors import ContractError
from agrpo.schema import setting
from agrpo.types import Group

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

    def rewards_of(self, group: Group, max_completion_length: int) -> np.ndarray:
        """[usable rollouts] float64: summed reward, length penalty, bias, scaling, clipping; NaN = unscorable."""
        usable = group.usable
        rewards = np.array([r.reward for r in usable], np.float64)
        generated = np.array([sum(len(t.output_ids) for t in r.turns) for r in usable], np.int64)
        rewards = rewards + self.overlong.penalty(generated, max_completion_length)
        rewards = (rewards + self.reward_bias) * self.reward_scaling
        return rewards if self.reward_clip is None else np.clip(rewards, -self.reward_clip, self.reward_clip)

    def of(self, group: Group, max_completion_length: int) -> np.ndarray:
        """[usable rollouts] float64 advantages; 0 where unscorable."""
        return self.of_rewards(self.rewards_of(group, max_completion_length))

    def of_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """Advantages of one group's `rewards_of`: 1, 0, 0, 0 gives 1.73205, -0.57735, -0.57735, -0.57735."""
        if self.rollout_time_norm:
            return normalise(rewards, mean_level="group", std_level="group", eps=ROLLOUT_TIME_EPS)
        return normalise(
            rewards,
            mean_level=self.mean_level,
            std_level=self.std_level,
            leave_one_out=self.leave_one_out,
            unbiased=self.std_unbiased,
            eps=self.eps,
        )

    def is_zero_std(self, rewards: np.ndarray) -> bool:
        """All scored rewards equal within tolerance; true also if none is scored (ADV-4)."""
        scored = rewards[~np.isnan(rewards)]
        if not len(scored):
            return True
        return bool(np.ptp(scored) <= self.zero_std_tolerance * max(1.0, float(np.abs(scored).max())))

    def has_signal(self, rewards: np.ndarray) -> bool:
        """At least two scored rewards that differ: what `frac_reward_zero_std` counts the absence of (ADV-5)."""
        return int((~np.isnan(rewards)).sum()) >= 2 and not self.is_zero_std(rewards)

    def drop_reason(self, rewards: np.ndarray) -> str | None:
        """Why the group with these `rewards_of` is not trained: `under_scored`, `zero_std`, or None (ADV-5 to ADV-9)."""
        num_scored = int((~np.isnan(rewards)).sum())
        if num_scored == 0:
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
        for name, value in (("mean_level", self.mean_level), ("std_level", self.std_level)):
            if value == "batch":
                lines.append(f"advantage.{name}=batch is not available yet; use group or null")
        if self.token_norm is not None:
            lines.append(f"advantage.token_norm={self.token_norm} is not available yet; use null")
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


def normalise(
    rewards: np.ndarray,
    *,
    mean_level: str | None,
    std_level: str | None,
    leave_one_out: bool = False,
    unbiased: bool = False,
    eps: float = 1e-8,
    references: np.ndarray | None = None,
    row_counts: np.ndarray | None = None,
    group_sizes: np.ndarray | None = None,
) -> np.ndarray:
    """(reward - baseline) / divisor of each row, with the statistics of its rollout's group or of the whole batch.

    rewards [rows]; references [rollouts] default to each rollout's first row, NaN = unscored; row_counts [rollouts] default
    to 1; group_sizes [groups] in rollouts, default one group. Rows of unscored rollouts get 0 (AREAL-WF-50 to 52).
    rewards 1 2 3, row_counts 2 1, references 1 3, eps 0, population std gives -1 0 1.
    """
    rewards = np.asarray(rewards, np.float64)
    counts = np.ones(len(rewards), np.int64) if row_counts is None else np.asarray(row_counts, np.int64)
    first_row = np.cumsum(counts) - counts
    refs = rewards[first_row] if references is None else np.asarray(references, np.float64)
    groups = np.array([len(refs)]) if group_sizes is None else np.asarray(group_sizes, np.int64)
    assert counts.sum() == len(rewards) and len(refs) == len(counts) == groups.sum()
    parts = {"group": np.split(np.arange(len(refs)), np.cumsum(groups)[:-1]), "batch": [np.arange(len(refs))]}
    baseline, divisor = np.zeros(len(refs)), np.ones(len(refs))
    for members in parts.get(mean_level, []):
        baseline[members] = _baseline(refs[members], leave_one_out)
    for members in parts.get(std_level, []):
        # Around the chosen baseline, also a leave-one-out or batch one; without a baseline around the plain mean.
        center = baseline[members] if mean_level is not None else _baseline(refs[members], False)
        divisor[members] = _divisor(refs[members] - center, unbiased, eps)
    rollout_of_row = np.repeat(np.arange(len(refs)), counts)
    values = (rewards - baseline[rollout_of_row]) / divisor[rollout_of_row]
    return np.where(np.isnan(refs[rollout_of_row]), 0.0, values)


def _baseline(references: np.ndarray, leave_one_out: bool) -> np.ndarray:
    """[n] mean of the scored references; all of them equal gives exactly that value, so that 0.1, 0.1, 0.1 minus it is 0."""
    scored = references[~np.isnan(references)]
    if not len(scored):
        return np.zeros(len(references))
    if np.ptp(scored) == 0 or len(scored) == 1:
        return np.full(len(references), scored[0])
    if leave_one_out:
        return (scored.sum() - references) / (len(scored) - 1)
    return np.full(len(references), scored.mean())


def _divisor(deviations: np.ndarray, unbiased: bool, eps: float) -> float:
    scored = deviations[~np.isnan(deviations)]
    degrees = len(scored) - 1 if unbiased else len(scored)
    if degrees < 1:
        return 1.0
    std = math.sqrt(float((scored**2).sum()) / degrees)
    return 1.0 if std <= eps else std + eps


def checked(advantages: Any, rewards: np.ndarray, source: str) -> np.ndarray:
    """The result of an advantage function as float64, or ContractError (ADV-11); unscorable rollouts get 0 (ADV-10)."""
    try:
        values = np.asarray(advantages, np.float64)
    except (TypeError, ValueError) as error:
        raise ContractError(f"advantage function {source} must return one number per rollout: {error}") from error
    if values.shape != rewards.shape:
        raise ContractError(
            f"advantage function {source} must return {len(rewards)} values, one per usable rollout, got shape {values.shape}"
        )
    scored = ~np.isnan(rewards)
    if not np.isfinite(values[scored]).all():
        raise ContractError(
            f"advantage function {source} returned a non-finite value for a scored rollout: {values.tolist()}"
        )
    return np.where(scored, values, 0.0)

"""A named evaluation: its own prompts, sampling and rewards, and figures of exactly one weight version.

    reward        mean over prompts of the mean summed reward of a prompt's scored rollouts
    reward_ci95   1.96 standard errors of it over prompts (normal approximation): the interval is reward +- reward_ci95
    pass_at_k     mean over prompts of 1 - C(n - c, k) / C(n, k), for n scored rollouts of which c pass
                  (unbiased; Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1)
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agrpo.schema import setting
from agrpo.types import Group, Prompt, Rollout

Play = Callable[[Prompt, int, int], Awaitable[Rollout]]  # prompt, group id, slot
Score = Callable[[Group], Awaitable[Group]]
Result = dict[str, float]
NO_LENGTH = "max_prompts must be set (>= 1), because these data have no length (a stream, or none at all), got null"
SURE = 1.96  # standard errors on each side that hold 95 % of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What is asked, how often and when."""

    data: Any = setting(doc="a data component, as in the group data")
    scorer: Any = setting(None, "a scorer component, as in the group scorer; null = the run's")
    num_rollouts: int = setting(1, "rollouts per prompt", ge=1)
    temperature: float = setting(1.0, "sampling temperature; 0 = the most likely token", ge=0)
    max_completion_length: int | None = setting(None, "most tokens of one answer; null = the sampler's", ge=1)
    at_start: bool = setting(True, "evaluate before the first step")
    every: int | None = setting(None, "steps between evaluations beside training; null = none", ge=1)
    at_end: bool = setting(True, "evaluate after the last step")
    max_prompts: int | None = setting(None, "first prompts of the data to use; null = all", ge=1)
    max_held_syncs: int = setting(
        4, "weight syncs in a row that are left out while it runs beside training, before it is given up", ge=0
    )
    pass_reward: float = setting(1.0, "a rollout passes with at least this summed reward")
    pass_at: list[int] = setting(factory=lambda: [1], doc="the k of pass@k, each at most num_rollouts; [] = none")

    def problems(self, config: Any) -> list[str]:
        # No epoch of these data has to end a run.
        asked = replace(config, run=replace(config.run, max_steps=config.run.max_steps or 1))
        lines = list(self.data.problems(asked))
        if self.max_prompts is None and getattr(self.data, "is_endless", False):
            lines.append(NO_LENGTH)
        if self.scorer is not None and hasattr(self.scorer, "problems"):
            lines += [f"scorer: {line}" for line in self.scorer.problems(replace(config, data=self.data))]
        if not all(1 <= k <= self.num_rollouts for k in self.pass_at):
            lines.append(f"pass_at must hold numbers from 1 to num_rollouts={self.num_rollouts}, got {self.pass_at}")
        if not hasattr(self.data, "open"):
            lines.append("data must be a data component, for example {_target_: agrpo.data.jsonl.Jsonl, path: FILE}")
        return lines

    async def run(self, prompts: Any, play: Play, score: Score, version: int) -> Result:
        """The figures, `version` among them; {} where any answer came from other weights or a rollout was taken back.

        Group ids count down from -1: every request has a seed of its own, the same each time the evaluation runs.
        """
        began = time.monotonic()
        groups = await asyncio.gather(
            *(self._group(-1 - i, prompts.prompt_of(i), play, score, version) for i in range(self._count(prompts)))
        )
        rollouts = list(itertools.chain.from_iterable(g.rollouts for g in groups))
        if any(r.failure == "stale" or not _is_of(r, version) for r in rollouts):
            return {}
        usable = [r for r in rollouts if r.failure is None]
        return {
            **self.figures([[r.reward for r in g.usable if not math.isnan(r.reward)] for g in groups]),
            "version": version,
            "failed_count": len(rollouts) - len(usable),
            "mean_length": sum(sum(r.generated_counts) for r in usable) / max(len(usable), 1),
            "clipped_ratio": sum(r.truncated for r in usable) / max(len(usable), 1),
            "duration_s": time.monotonic() - began,
        }

    def figures(self, rewards: Sequence[Sequence[float]]) -> Result:
        """What the rewards of each prompt's scored rollouts come to; NaN where there is nothing to take the mean of."""
        means = [sum(values) / len(values) for values in rewards if values]
        reward, spread = mean_and_ci95(means)
        found = {
            "reward": reward,
            "reward_ci95": spread,
            "rollouts_count": sum(map(len, rewards)),
            "prompts_count": len(means),
        }
        passed = [(len(values), sum(v >= self.pass_reward for v in values)) for values in rewards]
        for k in self.pass_at:
            # A prompt with fewer scored rollouts than k has no estimate.
            found[f"pass_at_{k}"], _ = mean_and_ci95([pass_at(n, c, k) for n, c in passed if n >= k])
        return found

    def _count(self, prompts: Any) -> int:
        if not hasattr(prompts, "__len__"):
            return self.max_prompts  # never null: `problems`, and a source that does not say so, where it is opened
        return min(len(prompts), self.max_prompts or len(prompts))

    async def _group(self, group_id: int, prompt: Prompt, play: Play, score: Score, version: int) -> Group:
        played = await asyncio.gather(*(play(prompt, group_id, slot) for slot in range(self.num_rollouts)))
        group = Group(group_id, prompt, tuple(played), version)
        return await score(group) if group.usable else group


def pass_at(n: int, c: int, k: int) -> float:
    """Probability that one of k rollouts passes, drawn without replacement from n of which c pass."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by the normal approximation; NaN where there are too few values."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, SURE * math.sqrt(variance / len(values))


def _is_of(rollout: Rollout, version: int) -> bool:
    # A turn that a workflow gave may hold tokens that nobody generated; they are masked and have no version.
    return all((turn.versions[turn.output_mask] == version).all() for turn in rollout.turns)

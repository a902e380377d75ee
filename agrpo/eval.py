"""A named evaluation: its own prompts and sampling, the run's player and rewards, one weight version.

The trainer changes no weights while one runs, so every answer comes from the version it reports.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agrpo.schema import setting
from agrpo.types import Group, Prompt, Rollout

Play = Callable[[Prompt, int, int, float], Awaitable[Rollout]]  # prompt, group id, slot, temperature
Score = Callable[[Group], Awaitable[Group]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What is asked, how often and when."""

    data: Any = setting(doc="a data component, as in the group data")
    num_rollouts: int = setting(1, "rollouts per prompt", ge=1)
    temperature: float = setting(1.0, "sampling temperature; 0 = the most likely token", ge=0)
    at_start: bool = setting(True, "evaluate before the first step")
    at_end: bool = setting(True, "evaluate after the last step")
    max_prompts: int | None = setting(None, "first prompts of the data to use; null = all", ge=1)

    def problems(self, config: Any) -> list[str]:
        return list(self.data.problems(config))

    async def run(self, prompts: Any, play: Play, score: Score, version: int) -> dict[str, float]:
        """Mean reward over all scored rollouts, with what is needed to judge it; NaN if none was scored.

        Group ids count down from -1: every request has a seed of its own, the same each time the evaluation runs.
        """
        began = time.monotonic()
        groups = await asyncio.gather(
            *(self._group(-1 - i, prompts.prompt_of(i), play, score, version) for i in range(self._count(prompts)))
        )
        rollouts = list(itertools.chain.from_iterable(g.rollouts for g in groups))
        usable = [r for r in rollouts if r.failure is None]
        scored = [r.reward for r in usable if r.reward == r.reward]
        return {
            "reward": sum(scored) / len(scored) if scored else float("nan"),
            "version": version,
            "rollouts_count": len(scored),
            "failed_count": len(rollouts) - len(usable),
            "mean_length": sum(sum(r.generated_counts) for r in usable) / max(len(usable), 1),
            "clipped_ratio": sum(r.truncated for r in usable) / max(len(usable), 1),
            "duration_s": time.monotonic() - began,
        }

    def _count(self, prompts: Any) -> int:
        if not hasattr(prompts, "__len__"):
            return self.max_prompts or 0
        return min(len(prompts), self.max_prompts or len(prompts))

    async def _group(self, group_id: int, prompt: Prompt, play: Play, score: Score, version: int) -> Group:
        played = await asyncio.gather(
            *(play(prompt, group_id, slot, self.temperature) for slot in range(self.num_rollouts))
        )
        group = Group(group_id, prompt, tuple(played), version)
        return await score(group) if group.usable else group

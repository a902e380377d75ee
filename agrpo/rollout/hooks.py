"""What a rollout loop of the user's own is written with: the class to subclass, and the records its methods exchange.

    class Curriculum(RolloutLoop):
        @dataclass
        class Config:
            pass_rate_cap: float = 0.9

        async def setup(self):
            self.pass_rates = {}

        def filter_prompt(self, row_index, row, epoch):
            return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

Chosen by `rollout.loop`; the fields of `Config` are the keys of `rollout.loop_config`. Every method is optional (LOOP-1).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class TurnRecord:
    """One sampling request and its answer. Every list but `prompt_ids` has one entry per output token (LOOP-9, LOOP-10)."""

    prompt_ids: list[int]  # the whole prompt, all earlier turns included
    output_ids: list[int]
    output_log_probs: list[float] = field(default_factory=list)  # needed where a token is trained
    output_mask: list[int] | None = None  # 1 = trained, 0 = context; None = all trained
    output_sampling_mask: list[list[int]] | None = None  # candidate ids under top-k, top-p, min-p; None = whole vocabulary
    output_sampler_logprobs: list[dict[int, float]] | None = None  # the sampler's most likely tokens, for score centering
    output_versions: list[int] | None = None  # weight version of each token; None = that at the rollout's start
    finish_reason: str = "stop"  # or "length"


@dataclass
class Rollout:
    """One play of a prompt. Training uses only what is in `turns` (LOOP-11)."""

    completion: list[dict[str, Any]]  # messages after the prompt
    completion_ids: list[int]
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None  # added to the other sources; None = none from here (LOOP-12)
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    played: Any = field(default=None, repr=False, compare=False)  # what the built-in loop measured, where it played it


@dataclass
class TrainingSequence:
    """One sequence that the trainer would see of a rollout; every list has one entry per token."""

    token_ids: list[int]
    loss_mask: list[int]  # 1 = trained
    log_probs: list[float]  # the sampler's, 0 where not trained
    versions: list[int]  # -1 where not trained


@dataclass
class RolloutGroup:
    """The usable rollouts of one prompt, scored together; every list has one entry per rollout (LOOP-13)."""

    prompts: list[list[dict[str, Any]]]
    reward_kwargs: dict[str, list[Any]]  # the row's other columns
    completions: list[list[dict[str, Any]]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[TrainingSequence]]
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int  # when the group's first rollout began
    group_id: int
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]  # Rollout.reward of each
    queued_at: float = 0.0  # time.monotonic() when it entered the score queue
    rewards: np.ndarray | None = None  # [rollouts] sum of all sources; NaN = unscorable
    group: Any = field(default=None, repr=False, compare=False)  # as the rest of agrpo holds it


class RolloutLoop:
    """GRPO as it is. `self.config` and `self.tokenizer` are there in every method (LOOP-8)."""

    config: Any  # own settings by name, then the sections and groups of the run's configuration
    tokenizer: Any

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether the prompt is played in this pass over the data; `epoch` counts complete passes before it."""
        return True

    async def generate_one(self, prompt: list[dict[str, Any]], tools: list[Callable], group_id: int = 0) -> Rollout:
        """One rollout; by default a chat with tools and environment. What it raises costs this rollout only."""
        return await self._play().chat(prompt, tools)

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """One request with the run's sampling settings; may be called any number of times in `generate_one`."""
        return await self._play().ask(prompt_ids)

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """[rollouts] one advantage each; called for every scored group, also for those that are dropped."""
        return self._advantages(group)

    async def setup(self) -> None:
        """Make what the other methods need, on the event loop they run on, before the first prompt."""

    async def close(self) -> None:
        """Release what `setup` made; runs at the end, also after a failure."""

    def state_dict(self) -> Any:
        """What a checkpoint keeps: plain values (numbers, text, lists, mappings); None = nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take back what `state_dict` gave; called after `setup` when a run is resumed."""

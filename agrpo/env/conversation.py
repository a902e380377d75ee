"""`env=conversation`: chat through the model's own template, one assistant turn per rollout.

Prompts are sent as token ids and the answer's ids are kept as they are; text is decoded for rewards only (GEN-3).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.schema import setting
from agrpo.types import Prompt, Rollout, Turn

Generate = Callable[[np.ndarray, tuple[int, int, int]], Awaitable[Turn]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Settings of a chat rollout."""

    factory: Any = setting(None, "environment class (import path), or a mapping from name to class")
    tools: list[str] = setting(factory=list, doc="import paths of functions the model may call")
    max_tool_calling_iterations: int | None = setting(None, "rounds of tool calls per rollout; null = no limit", ge=0)
    tool_timeout: float | None = setting(None, "seconds per tool call; null = no limit", gt=0)
    reuse_instances: bool = setting(True, "pool environment instances and reset them")
    pass_group_seed: bool = setting(False, "pass one seed per group to reset")

    def problems(self, config: Any) -> list[str]:
        lines = []
        if self.tools:
            lines.append("env.tools: this version plays single-turn chat; leave it empty")
        if self.factory is not None:
            lines.append("env.factory: this version plays single-turn chat; leave it null")
        return lines

    def open(self, tokenizer: Any, sampler: Any, max_model_len: int, eos_ids: frozenset[int] = frozenset()) -> Player:
        """A player for one run; `eos_ids` are those of the generation config, the tokenizer's is added (GEN-10)."""
        if tokenizer.eos_token_id is not None:
            eos_ids |= {int(tokenizer.eos_token_id)}
        return Player(tokenizer, dict(sampler.chat_template_kwargs or {}), max_model_len, eos_ids)


class Player:
    """Plays prompts; holds nothing of a rollout, so any number can be played at the same time."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any], max_model_len: int, eos_ids: frozenset[int]):
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs
        self.max_model_len, self.eos_ids = max_model_len, eos_ids

    def render(self, messages: list[dict[str, Any]]) -> np.ndarray:
        """Token ids [p] int32 of the conversation with the generation prompt (TURN-1)."""
        ids = self._tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False, **self._template_kwargs
        )
        return np.asarray(ids, np.int32)

    async def play(
        self, prompt: Prompt, generate: Generate, group_id: int, slot: int, prompt_ids: np.ndarray | None = None
    ) -> Rollout:
        """One rollout; RolloutFailure where its request failed. `prompt_ids` is the prompt rendered, if it is known."""
        began = time.monotonic()
        ids = self.render(prompt.messages) if prompt_ids is None else prompt_ids
        turn = await generate(ids, (group_id, slot, 0))
        text = self._tokenizer.decode(turn.output_ids, skip_special_tokens=True)
        return Rollout(
            turns=(turn,),
            completion=[{"role": "assistant", "content": text}],
            duration_s=time.monotonic() - began,
            truncated=int(turn.output_ids[-1]) not in self.eos_ids,
        )

"""What a workflow of the user's own is written with: the class to subclass, requests, answers, interactions (AREAL-WF-1).

class Answer(RolloutWorkflow):
    def __init__(self, tokenizer, gconfig):
        self.tokenizer, self.gconfig = tokenizer, gconfig

    async def arun_episode(self, engine, data):
        ids = self.tokenizer.apply_chat_template(data["prompt"], add_generation_prompt=True, return_dict=False)
        answer = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
        return answer.to_tensors(reward=float(len(answer.output_tokens) < 9))
"""

from __future__ import annotations

import dataclasses
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class RolloutWorkflow(ABC):
    """One call of `arun_episode` is one episode and one rollout of a group."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """A tensor dictionary, a dictionary of interactions, or None to reject the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationHyperparameters:
    """How to sample. What changes the distribution must equal the run's `sampler`, else its log-probs would be wrong."""

    n_samples: int = 1
    max_new_tokens: int | None = None  # None = sampler.max_completion_length, which is also the most
    max_tokens: int | None = None  # of prompt and answer together
    min_new_tokens: int = 0
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] | None = None

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)


@dataclass(slots=True, kw_only=True)
class ModelRequest:
    """One sampling request; only `input_ids` and the limits of `gconfig` matter to the server."""

    input_ids: Sequence[int]
    gconfig: Any = None
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokenizer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ModelResponse:
    """What the model gave; the lists have one entry per output token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str = "stop"  # or "length"
    latency: float = 0.0  # seconds
    rid: str = ""
    tokenizer: Any = None

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    def to_tensors(self, reward: float | None = None) -> dict[str, np.ndarray]:
        """The tensor dictionary of one row [1, T]: this request and its answer, with the answer trained."""
        num_in, num_out = self.input_len, self.output_len
        fields = {
            "input_ids": np.array([[*self.input_tokens, *self.output_tokens]], np.int32),
            "attention_mask": np.ones((1, num_in + num_out), np.bool_),
            "loss_mask": np.array([[0] * num_in + [1] * num_out], np.int32),
            "logprobs": np.array([[0.0] * num_in + list(self.output_logprobs)], np.float32),
            "versions": np.array([[-1] * num_in + list(self.output_versions)], np.int32),
        }
        return fields if reward is None else {**fields, "rewards": np.array([reward], np.float32)}


@dataclass(slots=True, kw_only=True)
class Interaction:
    """One request of an episode, its answer and its reward: one training row (AREAL-WF-6)."""

    model_response: ModelResponse | None  # None: no tokens are known, so it cannot be trained
    reward: float | None = None
    rollout_reward: float | None = None  # the reference of the whole episode; equal on all that state it
    messages: list[dict[str, Any]] = field(default_factory=list)

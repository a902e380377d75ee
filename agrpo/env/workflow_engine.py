"""The `engine` of one episode: sampling requests with the run's own settings, and the tokens they gave (AREAL-WF-3, 18)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np

from agrpo.env.workflow import ModelResponse
from agrpo.errors import ContractError
from agrpo.types import Turn

Generate = Callable[..., Awaitable[Turn]]  # (ids [p] int32, (group id, slot, turn), max_tokens=) -> Turn
TOP_K_OFF = 1_000_000  # at or above it, a top_k bounds nothing


class Engine:
    """Made for one episode; `turns` are all answers so far, in the order of the requests."""

    def __init__(
        self,
        generate: Generate,
        group_id: int,
        slot: int,
        sampler: Any,
        end_ids: frozenset[int],
        version: Callable[[], int],
    ):
        self._generate, self._group_id, self._slot = generate, group_id, slot
        self._sampler, self._end_ids, self._version = sampler, end_ids, version
        self._num_requests = 0
        self.turns: list[Turn] = []

    def get_version(self) -> int:
        """The weight version that the servers hold now."""
        return self._version()

    async def agenerate(self, request: Any) -> ModelResponse:
        """The answer to `request`; RolloutFailure if it cannot be had, ContractError for settings of another distribution."""
        ids = np.asarray(request.input_ids, np.int64).reshape(-1)
        limit = self._limit(getattr(request, "gconfig", None), len(ids))
        key = (self._group_id, self._slot, self._num_requests)
        self._num_requests += 1
        began = time.monotonic()
        turn = await self._generate(ids.astype(np.int32), key, max_tokens=limit)
        self.turns.append(turn)
        return ModelResponse(
            input_tokens=ids.tolist(),
            output_tokens=turn.output_ids.tolist(),
            output_logprobs=turn.sampler_logprobs.tolist(),
            output_versions=turn.versions.tolist(),
            stop_reason=turn.finish_reason,
            latency=time.monotonic() - began,
            rid=getattr(request, "rid", ""),
            tokenizer=getattr(request, "tokenizer", None),
        )

    def _limit(self, gconfig: Any, num_prompt_tokens: int) -> int | None:
        """Most tokens to generate: the smallest of what is asked for and `sampler.max_completion_length`."""
        given = _values(gconfig)
        for name, allowed in _fixed(self._sampler).items():
            value = given.get(name, allowed)
            if name == "top_k" and value is not None and (value < 0 or value >= TOP_K_OFF):
                value = 0
            if value is not None and value != allowed:
                raise ContractError(
                    f"rollout.workflow: gconfig.{name} must be {allowed}, the value of this run, got {value!r}; log-probs of "
                    f"another distribution cannot be trained: set sampler.{name} instead, or leave it out"
                )
        if given.get("stop"):
            raise ContractError(
                f"rollout.workflow: gconfig.stop must be empty, got {given['stop']!r}: cut the answer instead"
            )
        others = set(given.get("stop_token_ids") or ()) - self._end_ids
        if others:
            raise ContractError(
                f"rollout.workflow: gconfig.stop_token_ids must be the model's own end tokens {sorted(self._end_ids)}, "
                f"got also {sorted(others)}"
            )
        asked = [given["max_new_tokens"]] if given.get("max_new_tokens") else []
        asked += [given["max_tokens"] - num_prompt_tokens] if given.get("max_tokens") else []
        if not asked:
            return None
        if min(asked) < 1:
            raise ContractError(
                f"rollout.workflow: gconfig leaves room for {min(asked)} new tokens; at least 1 is needed"
            )
        return min(*asked, self._sampler.max_completion_length)


def _fixed(sampler: Any) -> dict[str, Any]:
    """Values that decide what the sampled distribution is."""
    return {
        "n_samples": 1,
        **sampler.distribution,
        "greedy": False,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def _values(gconfig: Any) -> dict[str, Any]:
    if gconfig is None:
        return {}
    if isinstance(gconfig, Mapping):
        return dict(gconfig)
    return {name: getattr(gconfig, name) for name in _NAMES if hasattr(gconfig, name)}


_NAMES = (
    "n_samples", "temperature", "top_p", "top_k", "min_p", "greedy", "min_new_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "max_new_tokens", "max_tokens",
)  # fmt: skip


def owners(
    row_ids: np.ndarray, trained: np.ndarray, logprobs: np.ndarray, turns: Iterable[Turn]
) -> list[tuple[int, int]]:
    """For each token of a row the answer that it came from and its place there, as (index, place); (-1, -1) if none.

    A row that begins with a request's prompt owns that answer at once; trained tokens that are left, as in a row whose
    history was cut, are looked for in all answers, the longest match first and then the nearest log-probs.
    """
    turns = list(turns)
    found = [(-1, -1)] * len(row_ids)
    for index, turn in enumerate(turns):
        start = len(turn.prompt_ids)
        if start <= len(row_ids) and np.array_equal(row_ids[:start], turn.prompt_ids):
            for place in range(_agreeing(row_ids[start:], turn.output_ids)):
                found[start + place] = (index, place)
    at = 0
    while at < len(row_ids):
        if not trained[at] or found[at][0] >= 0:
            at += 1
            continue
        stretch = 1
        while at + stretch < len(row_ids) and trained[at + stretch] and found[at + stretch][0] < 0:
            stretch += 1
        length, _, index, place = _best(row_ids[at : at + stretch], logprobs[at : at + stretch], turns)
        for step in range(length):
            found[at + step] = (index, place + step)
        at += max(length, 1)
    return found


def _agreeing(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common beginning."""
    shared = min(len(first), len(second))
    differs = np.flatnonzero(first[:shared] != second[:shared])
    return int(differs[0]) if len(differs) else shared


def _best(ids: np.ndarray, logprobs: np.ndarray, turns: list[Turn]) -> tuple[int, float, int, int]:
    """Match length, minus its largest log-prob difference, answer and place of the best match; length 0 if none."""
    best = (0, 0.0, -1, -1)
    for index, turn in enumerate(turns):
        for place in np.flatnonzero(turn.output_ids == ids[0]):
            length = _agreeing(ids, turn.output_ids[place:])
            gap = np.abs(logprobs[:length] - turn.sampler_logprobs[place : place + length]).max()
            best = max(best, (length, -float(gap), index, int(place)))
    return best

"""The user's records <-> what flows between the stations; lengths and needs are checked here (LOOP-9 to LOOP-13)."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from agrpo.env.stitch import stitch
from agrpo.errors import ContractError, RolloutFailure
from agrpo.rollout.hooks import Rollout, RolloutGroup, TrainingSequence, TurnRecord
from agrpo.types import Group, Prompt, Ragged, Turn
from agrpo.types import Rollout as Played

SOURCE = "rollout"  # name of the reward source


class Needs:
    """What trained tokens must come with in this run."""

    def __init__(self, num_heads: int, is_truncated: bool):
        self.num_heads, self.is_truncated = num_heads, is_truncated

    def turn(self, record: Any, version: int, where: str) -> Turn:
        """The record as arrays; ContractError naming the field that breaks the contract, RolloutFailure for a useless set."""
        if not isinstance(record, TurnRecord):
            raise ContractError(f"{where} must be a TurnRecord, got {type(record).__name__}")
        output, count = _ids(record.output_ids, f"{where}.output_ids"), len(record.output_ids)
        for name in ("output_mask", "output_sampling_mask", "output_sampler_logprobs", "output_versions"):
            value = getattr(record, name)
            if value is not None and len(value) != count:
                raise ContractError(f"{where}.{name} must have {count} entries, one per output token, got {len(value)}")
        mask = np.ones(count, np.bool_) if record.output_mask is None else np.asarray(record.output_mask).astype(bool)
        return Turn(
            prompt_ids=_ids(record.prompt_ids, f"{where}.prompt_ids"),
            output_ids=output,
            sampler_logprobs=_logprobs(record, mask, where),
            output_mask=mask,
            versions=np.full(count, version, np.int32)
            if record.output_versions is None
            else np.asarray(record.output_versions, np.int32),
            **self._heads(record, mask, where),
            candidates=self._candidates(record, mask, where),
            finish_reason=record.finish_reason,
        )

    def _heads(self, record: TurnRecord, mask: np.ndarray, where: str) -> dict[str, np.ndarray]:
        count, k, listed = len(mask), self.num_heads, record.output_sampler_logprobs
        ids, logprobs = np.zeros((count, k), np.int32), np.full((count, k), -np.inf, np.float32)
        if k and mask.any() and (listed is None or any(not listed[i] for i in np.flatnonzero(mask))):
            raise ContractError(
                f"{where}.output_sampler_logprobs is missing for trained tokens; the loss compares them with the sampler's most "
                "likely tokens: take the record of generate_one_turn, or set loss=grpo"
            )
        for at in np.flatnonzero(mask) if k else ():
            best = sorted(listed[at].items(), key=lambda entry: -entry[1])[:k]
            ids[at, : len(best)] = [int(token) for token, _ in best]
            logprobs[at, : len(best)] = [value for _, value in best]
        return {"head_ids": ids, "head_logprobs": logprobs}

    def _candidates(self, record: TurnRecord, mask: np.ndarray, where: str) -> Ragged | None:
        sets = record.output_sampling_mask
        if not self.is_truncated:
            if sets is not None:
                raise ContractError(
                    f"{where}.output_sampling_mask is given, but sampler.top_k=0 samples from the whole vocabulary; set the "
                    "truncation that was used, or leave it None"
                )
            return None
        if sets is None and mask.any():
            raise ContractError(
                f"{where}.output_sampling_mask is missing; with sampler.top_k > 0 every trained token needs its candidates"
            )
        for at in np.flatnonzero(mask).tolist():
            if record.output_ids[at] not in sets[at]:
                text = f"{where}.output_sampling_mask[{at}] lacks the token sampled there, {record.output_ids[at]}"
                raise RolloutFailure("candidates", text)
        return Ragged.of(sets if sets is not None else [()] * len(mask))

    def rollout(self, given: Any, version: int, where: str, eos_ids: frozenset[int]) -> Played:
        """What `generate_one` returned as a rollout."""
        if not isinstance(given, Rollout):
            raise ContractError(f"{where} must return a Rollout, got {type(given).__name__}")
        if not given.turns:
            raise RolloutFailure("no_request", f"{where} returned a rollout without turns")
        turns = tuple(self.turn(t, version, f"{where}: turns[{i}]") for i, t in enumerate(given.turns))
        last, reward = turns[-1].output_ids, given.reward
        if reward is not None:
            is_number = isinstance(reward, numbers.Real) and not isinstance(reward, bool | np.bool_)
            if not is_number or not math.isfinite(reward):
                raise ContractError(f"{where}: Rollout.reward must be a finite number or None, got {reward!r}")
        return Played(
            turns=turns,
            completion=given.completion,
            rewards={} if reward is None else {SOURCE: float(reward)},
            tool_call_count=given.tool_call_count,
            tool_failure_count=given.tool_failure_count,
            duration_s=given.played.duration_s if given.played is not None else 0.0,
            truncated=not len(last) or int(last[-1]) not in eos_ids,
            measured=given.played.measured if given.played is not None else (),
            extras={"rollout_id": given.rollout_id, "completion_ids": list(given.completion_ids)},
        )


def _ids(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ContractError(f"{name} must be a list of token ids, got {str(values)[:60]}")
    return array.astype(np.int32)


def _logprobs(record: TurnRecord, mask: np.ndarray, where: str) -> np.ndarray:
    given, count = record.output_log_probs, len(mask)
    if not len(given) and not mask.any():
        return np.zeros(count, np.float32)
    if len(given) != count:
        raise ContractError(
            f"{where}.output_log_probs must have {count} entries, one per output token, got {len(given)}; they are needed where "
            "a token is trained"
        )
    logprobs = np.asarray(given, np.float32)
    if not np.isfinite(logprobs[mask]).all():
        raise ContractError(f"{where}.output_log_probs must be finite on trained tokens")
    return logprobs


def record_of(turn: Turn) -> TurnRecord:
    """A turn as the user sees it."""
    heads = None
    if turn.head_ids.shape[1]:
        listed = zip(turn.head_ids.tolist(), turn.head_logprobs.tolist(), strict=True)
        heads = [{t: v for t, v in zip(ids, values, strict=True) if v > -math.inf} for ids, values in listed]
    sets = turn.candidates
    return TurnRecord(
        prompt_ids=turn.prompt_ids.tolist(),
        output_ids=turn.output_ids.tolist(),
        output_log_probs=turn.sampler_logprobs.tolist(),
        output_mask=None if turn.output_mask.all() else turn.output_mask.astype(int).tolist(),
        output_sampling_mask=None if sets is None else [sets[i].tolist() for i in range(len(sets))],
        output_sampler_logprobs=heads,
        output_versions=turn.versions.tolist(),
        finish_reason=turn.finish_reason,
    )


def rollout_of(played: Played) -> Rollout:
    """A rollout as the user sees it."""
    return Rollout(
        completion=played.completion,
        completion_ids=completion_ids(played),
        turns=[record_of(turn) for turn in played.turns],
        tool_call_count=played.tool_call_count,
        tool_failure_count=played.tool_failure_count,
        played=played,
    )


def completion_ids(played: Played) -> list[int]:
    """What was generated, or what `generate_one` said it was."""
    if "completion_ids" in played.extras:
        return played.extras["completion_ids"]
    return [int(i) for turn in played.turns for i in turn.output_ids]


def group_of(group: Group) -> RolloutGroup:
    """A scored group as `compute_advantages` sees it: its usable rollouts."""
    usable, prompt = group.usable, group.prompt
    return RolloutGroup(
        prompts=[r.prompt or prompt.messages for r in usable],
        reward_kwargs={name: [value] * len(usable) for name, value in prompt.columns.items()},
        completions=[r.completion for r in usable],
        completions_ids=[completion_ids(r) for r in usable],
        completions_sequences=[_sequences(r) for r in usable],
        tool_call_counts=[r.tool_call_count for r in usable],
        tool_failure_counts=[r.tool_failure_count for r in usable],
        model_version=group.version,
        group_id=group.group_id,
        row_index=prompt.row_index,
        env_rewards=[r.extras.get("env_reward") for r in usable],
        rollout_rewards=[r.rewards.get(SOURCE) for r in usable],
        queued_at=group.queued_at,
        rewards=np.array([r.reward for r in usable], np.float64),
        group=group,
    )


def _sequences(played: Played) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            s.token_ids.tolist(), s.loss_mask.astype(int).tolist(), s.sampler_logprobs.tolist(), s.versions.tolist()
        )
        for s in stitch(played, 0.0, 0, 0)
    ]


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The data-set row as `filter_prompt` sees it."""
    return {"prompt": prompt.messages, **prompt.columns} if prompt.messages else dict(prompt.columns)

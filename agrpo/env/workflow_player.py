"""A workflow as the player of rollouts: one call of `arun_episode` is one rollout, each row of its result one sample."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.env import workflow_context
from agrpo.env.workflow import Interaction
from agrpo.env.workflow_context import WorkflowContext
from agrpo.env.workflow_engine import Engine, Generate, owners
from agrpo.env.workflow_tensors import (
    REFERENCE,
    agreed,
    arrays_of,
    check_keys,
    check_values,
    joined,
    reference_and_offsets,
    reference_of,
)
from agrpo.errors import ContractError, RolloutFailure
from agrpo.types import Group, Prompt, Ragged, Rollout, Turn

SOURCE = "workflow"  # name of the reward source
REJECTED = "returned_none"


@dataclass(frozen=True, slots=True)
class Episode:
    """The rows of one result; `rewards` is None where the workflow gave none."""

    arrays: dict[str, np.ndarray]
    rewards: np.ndarray | None  # [rows] float64
    reference: float | None  # stated explicitly
    others: dict[str, Any]  # what is no tensor
    interaction_ids: tuple[str, ...]  # of a dictionary of interactions, else empty


class WorkflowPlayer:
    """`play` runs one episode; anything it raises is this rollout's failure, a broken contract ends the run (AREAL-WF-9)."""

    def __init__(
        self,
        workflow: Any,
        *,
        tokenizer: Any,
        sampler: Any,
        max_model_len: int,
        eos_ids: frozenset[int],
        settings: Any,  # the `rollout` section
        centering: bool,  # trained tokens need the sampler's head
        needs_all_rewards: bool = False,  # an interaction without reward leaves its rollout unscored (AREAL-WF-43)
        version: Callable[[], int] = lambda: 0,
    ):
        self._workflow, self._name = workflow, f"rollout.workflow: {type(workflow).__qualname__}"
        self._tokenizer, self._sampler, self.max_model_len = tokenizer, sampler, max_model_len
        self.eos_ids = eos_ids if tokenizer.eos_token_id is None else eos_ids | {int(tokenizer.eos_token_id)}
        pad = getattr(tokenizer, "pad_token_id", None)
        self._end_ids = self.eos_ids if pad is None else self.eos_ids | {int(pad)}
        self._num_heads = sampler.num_sampler_logprobs if centering else 0
        self._needs_all_rewards, self._version = needs_all_rewards, version
        self._num_to_check, self._time_limit = settings.check_format, settings.agent.time_limit

    def render(self, messages: list[dict[str, Any]]) -> np.ndarray:
        """Nothing: what is asked is the workflow's business."""
        return np.zeros(0, np.int32)

    async def play(
        self, prompt: Prompt, generate: Generate, group_id: int, slot: int, prompt_ids: np.ndarray | None = None
    ) -> Rollout:
        began, version = time.monotonic(), self._version()
        is_eval = group_id < 0
        engine = Engine(generate, group_id, slot, self._sampler, self._end_ids, self._version)
        token = workflow_context.set(WorkflowContext(is_eval, group_id, slot))
        try:
            result = await self._result(engine, prompt)
        finally:
            workflow_context.reset(token)
        if result is None:
            raise RolloutFailure(REJECTED, "arun_episode returned None")
        episode = self._episode(result)
        turns = self._turns(episode.arrays, engine.turns, version, is_eval)
        return self._rollout(episode, turns, time.monotonic() - began)

    async def _result(self, engine: Engine, prompt: Prompt) -> Any:
        data = copy.deepcopy(prompt.columns)
        if prompt.messages:
            data["prompt"] = copy.deepcopy(prompt.messages)
        try:
            async with asyncio.timeout(self._time_limit) as deadline:
                return await self._workflow.arun_episode(engine, data)
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"arun_episode took longer than rollout.agent.time_limit={self._time_limit:g} s"
            raise RolloutFailure("timeout", text) from None

    def _episode(self, result: Any) -> Episode:
        if not isinstance(result, Mapping):
            raise ContractError(
                f"{self._name}.arun_episode must return a tensor dictionary, a dictionary of interactions, or None, got "
                f"{type(result).__name__}"
            )
        if result and all(isinstance(value, Interaction) for value in result.values()):
            return self._of_interactions(result)
        arrays, others = arrays_of(self._name, result)
        explicit = reference_of(self._name, result.get(REFERENCE))
        arrays = {k: v for k, v in arrays.items() if k != REFERENCE}
        others = {k: v for k, v in others.items() if k != REFERENCE}
        if self._num_to_check > 0:
            self._num_to_check -= 1
            check_values(self._name, arrays, result)
        return Episode(arrays, arrays.get("rewards"), explicit, others, ())

    def _of_interactions(self, result: Mapping[str, Interaction]) -> Episode:
        """One row per interaction in the order of creation."""
        given = list(result.values())
        if any(i.model_response is None for i in given):
            raise RolloutFailure("no_token_data", "an interaction has no token data, so it cannot be trained")
        arrays = joined([i.model_response.to_tensors() for i in given])
        arrays, _ = arrays_of(self._name, arrays)
        explicit = agreed(self._name, [float(i.rollout_reward) for i in given if i.rollout_reward is not None])
        stated = [i.reward for i in given if i.reward is not None]
        if not stated or (self._needs_all_rewards and len(stated) < len(given)):
            return Episode(arrays, None, explicit, {}, tuple(result))
        rewards = np.array([i.reward or 0.0 for i in given], np.float64)
        if not np.isfinite(rewards).all():
            raise ContractError(f"{self._name}: rewards of interactions must be finite, got {rewards.tolist()}")
        return Episode(arrays, rewards, explicit, {}, tuple(result))

    def _turns(
        self, arrays: dict[str, np.ndarray], answers: list[Turn], version: int, is_eval: bool
    ) -> tuple[Turn, ...]:
        turns = []
        for row in range(len(arrays["input_ids"])):
            length = int(np.count_nonzero(arrays["attention_mask"][row]))
            own = {key: arrays[key][row, :length] for key in ("input_ids", "loss_mask", "logprobs")}
            trained = own["loss_mask"]
            if "versions" in arrays:
                versions = np.where(trained, arrays["versions"][row, :length], -1).astype(np.int32)
            else:
                versions = np.where(trained, version, -1).astype(np.int32)
            self._check_row(row, own, versions)
            turns.append(self._turn(row, own, versions, answers, is_eval))
        return tuple(turns)

    def _check_row(self, row: int, own: dict[str, np.ndarray], versions: np.ndarray) -> None:
        trained = own["loss_mask"]
        if not len(trained):
            raise ContractError(f"{self._name}: attention_mask of row {row} is all 0; every row needs tokens")
        if trained[0]:
            raise ContractError(
                f"{self._name}: loss_mask of row {row} must be 0 on the first token, which nothing predicts"
            )
        if not np.isfinite(own["logprobs"][trained]).all():
            raise ContractError(f"{self._name}: logprobs of row {row} must be finite where loss_mask is 1")
        if (versions[trained] < 0).any():
            raise ContractError(f"{self._name}: versions of row {row} must be at least 0 where loss_mask is 1")

    def _turn(
        self, row: int, own: dict[str, np.ndarray], versions: np.ndarray, answers: list[Turn], is_eval: bool
    ) -> Turn:
        """The row as one request and answer: the prompt ends where the first trained token begins."""
        ids, trained = own["input_ids"], own["loss_mask"]
        start = int(np.argmax(trained)) if trained.any() else len(ids)
        num, k = len(ids) - start, self._num_heads
        head_ids, head_logprobs = np.zeros((num, k), np.int32), np.full((num, k), -np.inf, np.float32)
        candidates: list[Any] = [()] * num
        # A vLLM before 0.28 gives none (SAMP-6).
        needs_sets = self._sampler.is_truncated and not is_eval and all(a.candidates is not None for a in answers)
        if k or needs_sets:
            found = owners(ids, trained, own["logprobs"], answers)
            for at in np.flatnonzero(trained):
                index, place = found[at]
                if index < 0 and not is_eval:
                    raise ContractError(self._unknown_text(row, int(at)))
                if index < 0:
                    continue
                answer = answers[index]
                head_ids[at - start], head_logprobs[at - start] = answer.head_ids[place], answer.head_logprobs[place]
                if needs_sets:
                    candidates[at - start] = answer.candidates[place]
        return Turn(
            prompt_ids=ids[:start],
            output_ids=ids[start:],
            sampler_logprobs=own["logprobs"][start:],
            output_mask=trained[start:],
            versions=versions[start:],
            head_ids=head_ids,
            head_logprobs=head_logprobs,
            candidates=Ragged.of(candidates) if needs_sets else None,
            finish_reason="stop" if self._has_ended(ids[start:], trained[start:]) else "length",
        )

    def _unknown_text(self, row: int, at: int) -> str:
        """What to do about a trained token whose head or candidates nobody recorded (AREAL-WF-18)."""
        changes = ["loss=grpo"] * bool(self._num_heads)
        changes += ["sampler.top_k=0 sampler.top_p=1 sampler.min_p=null"] * self._sampler.is_truncated
        return (
            f"{self._name}: token {at} of row {row} is trained but is in no answer of engine.agenerate in this episode, so the "
            f"sampler's view of it is unknown; generate it there, or set {' '.join(changes)}"
        )

    def _has_ended(self, output_ids: np.ndarray, trained: np.ndarray) -> bool:
        last = np.flatnonzero(trained)
        return bool(len(last)) and int(output_ids[last[-1]]) in self.eos_ids

    def _rollout(self, episode: Episode, turns: tuple[Turn, ...], duration_s: float) -> Rollout:
        rewards: dict[str, float | None] = {}
        offsets = np.zeros(len(turns))
        if episode.rewards is not None:
            rewards[SOURCE], offsets = reference_and_offsets(self._name, episode.rewards, episode.reference)
        texts = [self._tokenizer.decode(t.output_ids, skip_special_tokens=True) for t in turns]
        return Rollout(
            turns=turns,
            completion=[{"role": "assistant", "content": text} for text in texts],
            rewards=rewards,
            duration_s=duration_s,
            truncated=turns[-1].finish_reason == "length",
            row_offsets=offsets,
            has_reference=episode.reference is not None and episode.rewards is not None,
            extras={"arrays": episode.arrays, "others": episode.others, "interaction_ids": episode.interaction_ids},
        )

    def check(self, group: Group) -> None:
        """What holds between the episodes of a group (AREAL-WF-19, 38); ContractError."""
        ids = [r.extras["interaction_ids"] for r in group.usable]
        if any(ids) and not all(ids):
            raise ContractError(f"{self._name}: the episodes of one group returned both tensors and interactions")
        together = [i for own in ids for i in own]
        if len(set(together)) < len(together):
            twice = next(i for i in together if together.count(i) > 1)
            raise ContractError(f"{self._name}: the interaction id {twice!r} occurs in two episodes of one group")
        if group.usable:
            check_keys([{*r.extras["arrays"], *r.extras["others"]} for r in group.usable])

    def merged(self, group: Group) -> dict[str, Any]:
        """The usable episodes of a scored group as one tensor dictionary, for `rollout.accept_fn` (AREAL-WF-59).

        `rewards` and `original_rewards` [rows] are those of all sources, NaN where nothing scored the rollout.
        """
        usable = group.usable
        arrays = joined([{k: v for k, v in r.extras["arrays"].items() if k != "rewards"} for r in usable])
        totals = np.concatenate([r.reward + r.row_offsets for r in usable])
        return {**usable[0].extras["others"], **arrays, "rewards": totals, "original_rewards": totals}

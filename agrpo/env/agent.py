"""Any class with `async def run(self, data, **extra)` as the player of rollouts (AREAL-WF-64 to 67).

    class Solver:
        async def run(self, data, base_url, api_key, http_client, **extra):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
            answer = await client.chat.completions.create(model="agrpo", messages=data["messages"])
            return float(answer.choices[0].message.content == data["answer"])

The agent talks to a server on loopback that samples from the model being trained and keeps the tokens. Agents run on an
event loop in a thread of their own, so one that blocks delays other agents and nothing else of the run.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from agrpo.env import workflow_context
from agrpo.env.agent_export import exported
from agrpo.env.agent_loop import AgentLoop
from agrpo.env.proxy import Interaction, Proxy, Session
from agrpo.env.proxy.rendering import Rendering
from agrpo.env.workflow_context import WorkflowContext
from agrpo.errors import AgrpoError, ConfigError, ContractError, RolloutFailure
from agrpo.types import Prompt, Rollout

SOURCE = "agent"  # name of the reward source


class AgentPlayer:
    """Plays a prompt by running the agent once, in a session of its own."""

    def __init__(
        self,
        agent: Any,
        *,
        tokenizer: Any,
        sampler: Any,
        max_model_len: int,
        eos_ids: frozenset[int],
        settings: Any,  # the `rollout` section
    ):
        self._agent, self._name = agent, type(agent).__qualname__
        if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
            raise ConfigError(f"rollout.workflow: {self._name} must have `async def run(self, data, **extra)`")
        self._accepted = _accepted(agent.run)
        self._tokenizer, self._settings = tokenizer, settings.agent
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids if tokenizer.eos_token_id is None else eos_ids | {int(tokenizer.eos_token_id)}
        self._rendering = Rendering(tokenizer, sampler.chat_template_kwargs or {}, self.eos_ids)
        self._proxy, self._loop = Proxy(tokenizer, sampler, max_model_len), AgentLoop()

    async def start(self) -> None:
        await self._proxy.start()
        await self._loop.start()

    async def close(self) -> None:
        await self._loop.close()
        await self._proxy.close()

    def render(self, messages: list[dict[str, Any]]) -> np.ndarray:
        """Token ids [p] int32 of the prompt's messages, what an agent is likely to ask first; none for a row without."""
        return self._rendering.plain(messages) if messages else np.zeros(0, np.int32)

    async def play(
        self, prompt: Prompt, generate: Any, group_id: int, slot: int, prompt_ids: np.ndarray | None = None
    ) -> Rollout:
        """One run of the agent; whatever it raises is this rollout's failure, ContractError ends the run."""
        began = time.monotonic()
        session = Session(generate, group_id, slot, self._rendering, self._tokenizer)
        self._proxy.open(session)
        token = workflow_context.set(WorkflowContext(group_id < 0, group_id, slot))
        try:
            result = await self._run(prompt, session)
        except Exception as error:
            if session.error is None or isinstance(error, AgrpoError):
                raise
            raise session.error from error  # the agent stumbled over a generation that failed
        finally:
            workflow_context.reset(token)
            self._proxy.shut(session)
            given = await session.end()
        if isinstance(session.error, AgrpoError):
            raise session.error
        if not given:
            raise RolloutFailure("no_request", f"{self._name}.run ended without an answer from the model")
        self._note(result, given)
        return self._rollout(prompt, given, time.monotonic() - began)

    async def _run(self, prompt: Prompt, session: Session) -> Any:
        columns, messages = copy.deepcopy((prompt.columns, prompt.messages))
        data = {**columns, "prompt": messages, "messages": messages}
        extra = {
            "base_url": f"{self._proxy.url}/v1",
            "api_key": session.key,
            "http_client": self._loop.http_client,
        }
        extra = {name: value for name, value in extra.items() if self._accepted is None or name in self._accepted}
        limit = self._settings.time_limit
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._loop.run(lambda: self._agent.run(data, **extra))
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"{self._name}.run took longer than rollout.agent.time_limit={limit:g} s"
            raise RolloutFailure("agent_timeout", text + await self._loop.blocked_text()) from None

    def _note(self, result: Any, given: list[Interaction]) -> None:
        """Put what `run` returned on the interactions: a number is the reward of the last one (AREAL-WF-66)."""
        if result is None:
            return  # rewards were set one by one, or come from scorer.functions
        if not isinstance(result, Mapping):
            given[-1].reward = self._number(result, "returned")
            return
        by_id = {interaction.id: interaction for interaction in given}
        for key, value in result.items():
            if key not in by_id:
                known = ", ".join(by_id)
                raise ContractError(
                    f"{self._name}.run gave a reward to {key!r}, which is no answer it got; those are {known}"
                )
            by_id[key].reward = self._number(value, f"gave to {key}")

    def _number(self, value: Any, how: str) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
        if not is_number or not math.isfinite(value):
            raise ContractError(
                f"{self._name}.run {how} {value!r}; it must be a finite number, or a mapping from the ids of answers to such "
                "numbers, or None"
            )
        return float(value)

    def _rollout(self, prompt: Prompt, given: list[Interaction], duration_s: float) -> Rollout:
        last = given[-1]
        has_reward = any(i.reward is not None for i in given)
        turns, row_offsets = exported(given, self._settings.export_style, self._settings.turn_discount)
        return Rollout(
            turns=turns,
            row_offsets=row_offsets,
            has_reference=row_offsets is not None,
            completion=_completion(prompt.messages, [*last.ask.messages, last.message]),
            rewards={SOURCE: last.reward or 0.0} if has_reward else {},
            tool_call_count=sum(len(i.message.get("tool_calls", ())) for i in given),
            duration_s=duration_s,
            truncated=not last.was_stopped and int(last.turn.output_ids[-1]) not in self.eos_ids,
        )


def _accepted(run: Any) -> frozenset[str] | None:
    """The names of the extra arguments that `run` takes; None = any."""
    parameters = inspect.signature(run).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _completion(prompt: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after those of the prompt; where the agent wrote its own, all that came after its first ones."""
    start = 0
    while start < min(len(prompt), len(messages) - 1) and messages[start] == prompt[start]:
        start += 1
    if start == 0:
        start = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return messages[start:]

"""Plays one chat: ask, run the tools that were called, ask again, until the model calls none."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agrpo.env import calls
from agrpo.env.environments import ROUTE, Kind, Pool, Visit
from agrpo.env.render import Growing, Messages, Renderer
from agrpo.env.threads import Threads
from agrpo.env.toolbox import Toolbox
from agrpo.env.tools import Tool
from agrpo.errors import ConfigError, ContractError, RolloutFailure
from agrpo.types import Prompt, Rollout, Turn

Generate = Callable[..., Awaitable[Turn]]  # (prompt_ids, (group_id, slot, turn)) -> Turn


@dataclass(frozen=True, slots=True)
class Rules:
    """What ends a conversation, and how its environments are used."""

    max_model_len: int  # tokens
    eos_ids: frozenset[int]
    max_rounds: int | None = None  # rounds of tool calls
    tool_timeout_s: float | None = None
    env_limit_s: float | None = None
    reuses_instances: bool = True
    passes_group_seed: bool = False
    run_seed: int = 0


@dataclass(slots=True)
class Talk:
    """What a conversation has given so far."""

    turns: list[Turn] = field(default_factory=list)
    completion: Messages = field(default_factory=list)
    num_rounds: int = 0
    is_exhausted: bool = False  # stopped by the limit of rounds while still calling (TOOL-12)
    is_full: bool = False  # the next prompt would fill the context (GEN-15)


class Player:
    """Plays prompts; holds nothing of a rollout, so any number can be played at the same time."""

    def __init__(
        self,
        tokenizer: Any,
        rules: Rules,
        renderers: dict[str, Renderer],
        tools: Mapping[str, Tool] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        routes: bool = False,
    ):
        """`renderers` by name of the environment, "" without any; `routes`: rows name their environment."""
        self._tokenizer, self._rules, self._renderers = tokenizer, rules, renderers
        self._tools, self._kinds, self._routes = dict(tools or {}), dict(kinds or {}), routes
        self._threads = Threads()
        self._pools = {
            name: Pool(kind, self._threads, rules.reuses_instances, rules.env_limit_s) for name, kind in self._kinds.items()
        }
        self.max_model_len, self.eos_ids = rules.max_model_len, rules.eos_ids

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
        self._threads.close()

    def render(self, messages: Messages) -> np.ndarray:
        """Token ids [p] int32 of a prompt (TURN-1); empty where only an environment's `reset` will complete it."""
        return np.zeros(0, np.int32) if self._kinds else self._renderers[""].ids(messages)

    def check_rows(self, rows: Any) -> None:
        """ConfigError where rows of a map-style data set name environments that do not exist (ENV-13)."""
        if self._routes and hasattr(rows, "__len__"):
            lines = route_problems((rows[i].get(ROUTE) for i in range(len(rows))), list(self._kinds))
            if lines:
                raise ConfigError(lines)

    async def play(
        self, prompt: Prompt, generate: Generate, group_id: int, slot: int, prompt_ids: np.ndarray | None = None
    ) -> Rollout:
        """One rollout; RolloutFailure where a request or the environment failed. `prompt_ids` is the prompt rendered."""
        async with self.stage(prompt, group_id, slot, prompt_ids) as stage:
            return await stage.rewarded(await stage.chat(stage.messages, stage.tools, generate))

    @contextlib.asynccontextmanager
    async def stage(
        self, prompt: Prompt, group_id: int, slot: int, prompt_ids: np.ndarray | None = None
    ) -> AsyncIterator[Stage]:
        """What one rollout works with, until its end; RolloutFailure where the environment gives no prompt."""
        if not self._kinds:
            yield Stage(self, group_id, slot, prompt.messages, self._toolbox(None), None, prompt_ids)
            return
        pool = self._pools[self._kind_of(prompt)]
        visit = Visit(pool, await pool.lease())
        try:
            said = await visit.reset(self._columns(prompt, group_id))
            messages = with_observation(prompt.messages, said)
            if not messages:
                raise RolloutFailure(
                    "no_prompt", f"the row has no prompt and {visit.kind.source}.reset() returned none"
                )
            yield Stage(self, group_id, slot, messages, self._toolbox(visit), visit)
        finally:
            await visit.end()

    def _kind_of(self, prompt: Prompt) -> str:
        if not self._routes:
            return next(iter(self._kinds))
        name = prompt.columns.get(ROUTE)
        if name not in self._kinds:
            text = f"row {prompt.row_index} names the environment {name!r}; known: {', '.join(self._kinds)}"
            raise RolloutFailure("unknown_environment", text)
        return name

    def _columns(self, prompt: Prompt, group_id: int) -> dict[str, Any]:
        """Keyword arguments of `reset` (ENV-5, ENV-12, ENV-15)."""
        columns = {name: value for name, value in prompt.columns.items() if not (self._routes and name == ROUTE)}
        if prompt.messages:
            columns["prompt"] = prompt.messages
        if self._rules.passes_group_seed:
            columns["group_seed"] = group_seed(self._rules.run_seed, group_id)
        return columns

    def _toolbox(self, visit: Visit | None) -> Toolbox | None:
        """The tools of this rollout; None in a run without tools and environments."""
        if visit is None and not self._tools:
            return None
        own = dict(visit.kind.tools) if visit is not None else {}
        bound = visit.bound() if visit is not None else {}
        return Toolbox({**self._tools, **own}, self._threads, self._rules.tool_timeout_s, bound)

    async def _talk(
        self,
        messages: Messages,
        generate: Generate,
        group_id: int,
        slot: int,
        toolbox: Toolbox | None,
        visit: Visit | None,
        prompt_ids: np.ndarray | None = None,
    ) -> Talk:
        """Turns until the model calls no tool, or a limit is reached (TOOL-11, GEN-15)."""
        renderer = self._renderers[visit.kind.name if visit is not None else ""]
        growing = Growing(renderer, messages, renderer.ids(messages) if prompt_ids is None else prompt_ids)
        talk = Talk()
        while True:
            turn = await generate(growing.prompt, (group_id, slot, len(talk.turns)))
            message = self._message(turn, growing.prompt, renderer, toolbox)
            talk.turns.append(turn)
            talk.completion.append(message)
            if toolbox is None or "tool_calls" not in message:
                return talk
            if talk.num_rounds == self._rules.max_rounds:
                talk.is_exhausted = True
                return talk
            talk.num_rounds += 1
            with visit.working(toolbox) if visit is not None else contextlib.nullcontext():
                results = await toolbox.answer(message["tool_calls"])
            talk.completion += results
            if len(growing.extend([message, *results])) >= self.max_model_len:
                talk.is_full = True
                return talk

    def _message(self, turn: Turn, prompt: np.ndarray, renderer: Renderer, toolbox: Toolbox | None) -> dict[str, Any]:
        if toolbox is None:
            text = self._tokenizer.decode(turn.output_ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        content, called = calls.parse(turn.output_ids, self._tokenizer, prompt, renderer.schemas)
        message = {"role": "assistant", "content": content}
        if called:
            # Some templates insist on identifiers of nine characters.
            numbered = [{"id": f"call{toolbox.num_calls + i:05d}", **call} for i, call in enumerate(called)]
            message["tool_calls"] = numbered
        return message

    def _rollout(self, talk: Talk, toolbox: Toolbox | None, began: float) -> Rollout:
        last = talk.turns[-1].output_ids
        return Rollout(
            turns=tuple(talk.turns),
            completion=talk.completion,
            tool_call_count=toolbox.num_calls if toolbox is not None else 0,
            tool_failure_count=toolbox.num_failed if toolbox is not None else 0,
            duration_s=time.monotonic() - began,
            truncated=talk.is_full or not len(last) or int(last[-1]) not in self.eos_ids,
            measured=toolbox.summary(talk.is_exhausted) if toolbox is not None else (),
        )


@dataclass(slots=True)
class Stage:
    """What one rollout works with: its first messages, its tools and its environment."""

    player: Player
    group_id: int
    slot: int
    messages: Messages
    toolbox: Toolbox | None
    visit: Visit | None
    prompt_ids: np.ndarray | None = None  # the messages rendered, if they are known
    began: float = field(default_factory=time.monotonic)

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What the model may call: the run's functions and this environment's methods."""
        if self.toolbox is None:
            return []
        return [self.toolbox.bound.get(name, tool.function) for name, tool in self.toolbox.tools.items()]

    async def chat(self, messages: Messages, tools: list[Callable[..., Any]], generate: Generate) -> Rollout:
        """The built-in rollout from `messages` on; ContractError for tools other than `self.tools`."""
        if list(tools) != self.tools:
            raise ContractError("generate_one: the built-in rollout plays with the tools it was given, not with others")
        ids = self.prompt_ids if messages is self.messages else None
        player = self.player
        talk = await player._talk(messages, generate, self.group_id, self.slot, self.toolbox, self.visit, ids)
        return player._rollout(talk, self.toolbox, self.began)

    async def rewarded(self, rollout: Rollout) -> Rollout:
        """The finished rollout with what the environment adds: the prompt it began with, its reward and its times."""
        visit = self.visit
        if visit is None:
            return rollout
        reward = await visit.reward()
        times = (("env/reset_s", visit.reset_s), ("env/reward_s", visit.reward_s))
        own = {"env_reward": (visit.cls, reward)} if reward is not None else {}
        return dataclasses.replace(
            rollout,
            rewards=rollout.rewards if reward is None else {**rollout.rewards, visit.kind.source: reward},
            prompt=self.messages,
            measured=rollout.measured + tuple((name, seconds, 1.0) for name, seconds in times if seconds is not None),
            duration_s=time.monotonic() - self.began,
            extras={**rollout.extras, **own},
        )


def with_observation(messages: Messages, said: str) -> Messages:
    """The prompt with what `reset` said behind the last user message, or as one if there is none (ENV-6)."""
    if not said:
        return list(messages)
    users = [i for i, m in enumerate(messages) if m.get("role") == "user"]
    if not users:
        return [*messages, {"role": "user", "content": said}]
    message = messages[users[-1]]
    content = message.get("content") or ""
    content = content + said if isinstance(content, str) else [*content, {"type": "text", "text": said}]
    return [*messages[: users[-1]], {**message, "content": content}, *messages[users[-1] + 1 :]]


def group_seed(run_seed: int, group_id: int) -> int:
    """63 bits, the same for the members of a group and in a resumed run (ENV-15)."""
    digest = hashlib.blake2b(struct.pack("<2q", run_seed, group_id), digest_size=8, person=b"group")
    return int.from_bytes(digest.digest(), "little") >> 1


def route_problems(names: Any, known: list[str]) -> list[str]:
    """The line about environments that a data set names and the mapping does not."""
    unknown = sorted({str(name) for name in names if name not in known})
    if not unknown:
        return []
    shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return [f"env.factory has no environment {shown}, which the column `{ROUTE}` names; known: {', '.join(known)}"]

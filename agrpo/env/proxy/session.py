"""One rollout's side of the proxy: every answer given to the agent, as the exact tokens that were sampled.

A request whose messages begin with an earlier conversation of this session, answer included, goes on from the tokens of
that answer (token-exact); any other request is rendered anew and starts a sample of its own.

An answer is recorded once, however often a client library asks for it: a repetition of a request whose answer did not
reach the agent gets that answer (AREAL-WF-67). An answer that never reached the agent is not trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agrpo.env import calls
from agrpo.env.proxy.request import Ask, Refused, following
from agrpo.types import Turn

Generate = Callable[..., Awaitable[Turn]]  # (ids [p] int32, (group id, slot, turn), max_tokens=) -> Turn


@dataclass(slots=True, eq=False)
class Interaction:
    """One request and its answer; `turn` is None until it is there."""

    id: str  # what rewards are given by
    index: int  # position among the requests of the session
    ask: Ask
    parent: Interaction | None  # the answer that this request goes on from
    created: int = field(default_factory=lambda: int(time.time()))
    task: asyncio.Task[None] | None = None
    turn: Turn | None = None
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""  # "stop", "length" or "tool_calls"
    was_stopped: str = ""  # the stop string that ended it, empty where none did
    reward: float | None = None
    num_waiting: int = 0  # requests that await this answer
    reached_agent: bool = False


class Session:
    """The calls of one rollout; lives on the event loop that generates."""

    def __init__(self, generate: Generate, group_id: int, slot: int, renderer: Any, tokenizer: Any):
        self.key = f"sk-{secrets.token_hex(24)}"
        self.interactions: list[Interaction] = []
        self.error: Exception | None = None  # why a generation failed, the first time
        self._generate, self._group_id, self._slot = generate, group_id, slot
        self._renderer, self._tokenizer = renderer, tokenizer
        self._answered: dict[str, Interaction] = {}  # digest of a conversation up to an answer -> that answer

    @contextlib.asynccontextmanager
    async def answering(self, ask: Ask, is_retry: bool, prefix: str) -> AsyncIterator[Interaction]:
        """The answer, while it is being given; Refused, RolloutFailure or AgrpoError where there is none.

        `is_retry` says that the client knows it asked before; `prefix` begins the answer's id. Set `reached_agent` when
        the agent has it.
        """
        held = self._asked_before(ask, is_retry) or self._begin(ask, prefix)
        held.num_waiting += 1
        try:
            await asyncio.shield(held.task)
            yield held
        finally:
            held.num_waiting -= 1

    def _asked_before(self, ask: Ask, is_retry: bool) -> Interaction | None:
        same = ask.same_as
        for held in reversed(self.interactions):
            if held.ask.same_as == same and (is_retry or not (held.reached_agent or held.num_waiting)):
                failed = held.task.done() and held.turn is None
                return None if failed else held
        return None

    def _begin(self, ask: Ask, prefix: str) -> Interaction:
        held = Interaction(prefix + secrets.token_hex(12), len(self.interactions), ask, self._parent_of(ask))
        self.interactions.append(held)
        held.task = asyncio.create_task(self._sample(held))
        return held

    def _parent_of(self, ask: Ask) -> Interaction | None:
        """The longest earlier conversation that this one begins with, and that ended with an answer."""
        return next((self._answered[d] for d in reversed(ask.digests) if d in self._answered), None)

    async def _sample(self, held: Interaction) -> None:
        ask = held.ask
        try:
            ids = self._render(ask, held.parent)
            turn = await self._generate(ids, (self._group_id, self._slot, held.index), max_tokens=ask.max_tokens)
        except Refused:
            raise
        except Exception as error:
            self.error = self.error or error
            raise
        turn, before, held.was_stopped = until_stop(turn, ask.stop, self._tokenizer)
        said, made = (before, []) if held.was_stopped else self._read(ask, turn)
        held.message = {"role": "assistant", "content": said}
        if made:
            held.message["tool_calls"] = [{"id": f"call_{secrets.token_hex(8)}", **call} for call in made]
        held.finish_reason = "tool_calls" if made else "length" if turn.finish_reason != "stop" else "stop"
        held.turn = turn
        self._answered[following(ask.digests[-1], held.message)] = held

    def _read(self, ask: Ask, turn: Turn) -> tuple[str, list[dict[str, Any]]]:
        if ask.tools and ask.may_call:
            return calls.parse(turn.output_ids.tolist(), self._tokenizer, turn.prompt_ids.tolist(), ask.tools)
        return self._tokenizer.decode(turn.output_ids, skip_special_tokens=True), []

    def _render(self, ask: Ask, parent: Interaction | None) -> np.ndarray:
        try:
            return self._renderer(ask, parent)
        except Exception as error:  # whatever a chat template raises about the messages it was given
            text = f"the model's chat template cannot render these messages: {type(error).__name__}: {error}"
            raise Refused(text, "messages") from error

    def find(self, interaction_id: str) -> Interaction | None:
        """The answer of that id; None if this session has given none."""
        return next((i for i in self.interactions if i.id == interaction_id and i.turn is not None), None)

    def set_reward(self, interaction_id: str | None, reward: float) -> None:
        """The reward of an interaction, or of the last one; KeyError for an id that this session has not given."""
        done = [i for i in self.interactions if i.turn is not None]
        found = [i for i in done if i.id == interaction_id] if interaction_id is not None else done[-1:]
        if not found:
            raise KeyError(interaction_id)
        found[0].reward = float(reward)

    async def end(self) -> list[Interaction]:
        """Stop what is still being generated; the answers that reached the agent, in the order they were asked for."""
        open_tasks = [i.task for i in self.interactions if not i.task.done()]
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        return [i for i in self.interactions if i.turn is not None and i.reached_agent]


def until_stop(turn: Turn, stops: tuple[str, ...], tokenizer: Any) -> tuple[Turn, str, str]:
    """The turn up to the token that completes a stop string, the text before that string, and it; "" where there is none.

    A prefix of a sampled sequence is distributed as one sampled with that stop, so nothing else changes.
    """

    def stop_in(num_tokens: int) -> tuple[str, str] | None:
        text = tokenizer.decode(turn.output_ids[:num_tokens], skip_special_tokens=True)
        found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
        return None if found is None else (text[: found[0]], found[1])

    low, high = 1, len(turn.output_ids)  # the shortest prefix that holds a stop string, by bisection
    if not stops or stop_in(high) is None:
        return turn, "", ""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stop_in(middle) else (middle + 1, high)
    short = dataclasses.replace(
        turn,
        output_ids=turn.output_ids[:low],
        sampler_logprobs=turn.sampler_logprobs[:low],
        output_mask=turn.output_mask[:low],
        versions=turn.versions[:low],
        head_ids=turn.head_ids[:low],
        head_logprobs=turn.head_logprobs[:low],
        candidates=None if turn.candidates is None else turn.candidates.take(np.arange(low)),
        finish_reason="stop",
    )
    return short, *stop_in(low)

"""The user's rollout loop at work: bound to the run, and called where it overrides something (LOOP)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from agrpo.advantage import checked
from agrpo.config import locate
from agrpo.errors import AgrpoError, ConfigError, ContractError, RolloutFailure, StallError
from agrpo.rollout.hooks import Rollout, RolloutGroup, RolloutLoop, TurnRecord
from agrpo.rollout.loop_class import overrides, own_settings, problems
from agrpo.rollout.records import Needs, group_of, record_of, rollout_of, row_of
from agrpo.types import Group, Prompt, Turn
from agrpo.types import Rollout as Played

_log = logging.getLogger(__name__)


class Settings:
    """`self.config` of a loop: its own settings by name, then the run's configuration."""

    def __init__(self, own: Any, run: Any):
        self._own, self._run = own, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        own = self._own
        if isinstance(own, dict):
            if name in own:
                return own[name]
        elif hasattr(own, name):
            return getattr(own, name)
        if hasattr(self._run, name):
            return getattr(self._run, name)
        raise AttributeError(f"there is no setting {name}; give it as rollout.loop_config.{name}=VALUE")


@dataclass(slots=True)
class Play:
    """One rollout under way: what the defaults of `generate_one` and `generate_one_turn` work with."""

    generate: Callable[..., Awaitable[Turn]]
    group_id: int
    slot: int
    stage: Any = None  # messages, tools and environment, where the built-in chat can play it
    asking: Callable[..., Awaitable[Turn]] | None = None  # `generate` through the loop's own `generate_one_turn`
    num_turns: int = 0

    async def ask(self, prompt_ids: Any) -> TurnRecord:
        return record_of(await self.generate(np.asarray(prompt_ids, np.int32), self._key()))

    async def chat(self, messages: list[dict[str, Any]], tools: list[Callable]) -> Rollout:
        return rollout_of(await self.stage.chat(messages, tools, self._numbered))

    async def _numbered(self, ids: np.ndarray, key: tuple[int, int, int], max_tokens: int | None = None) -> Turn:
        """Requests are counted over the whole rollout: two chats in it must not ask with the same seeds."""
        return await self.asking(ids, self._key(), max_tokens=max_tokens)

    def _key(self) -> tuple[int, int, int]:
        key = (self.group_id, self.slot, self.num_turns)
        self.num_turns += 1
        return key


_playing: contextvars.ContextVar[Play] = contextvars.ContextVar("play")


class Custom:
    """A loop class bound to one run. The parts of the rollout process call it; without a class they never meet it."""

    def __init__(self, loop: RolloutLoop, config: Any, tokenizer: Any, version: Callable[[], int]):
        self.loop, self._config, self._version = loop, config, version
        self._name = f"rollout.loop: {type(loop).__qualname__}"
        sampler = config.sampler
        self._needs = Needs(sampler.num_sampler_logprobs if config.loss.wants_head else 0, sampler.is_truncated)
        run = config.run
        self._last_epoch = math.ceil(run.num_train_epochs) - 1 if run.max_steps is None else None
        self._rejected: Counter[int] = Counter()
        loop.config = Settings(own_settings(type(loop), config.rollout.loop_config)[0], config)
        loop.tokenizer = tokenizer
        loop._play = _playing.get
        loop._advantages = self._default_advantages
        self.computes_advantages = overrides(type(loop), "compute_advantages")

    async def setup(self, state: bytes | None) -> None:
        """`setup`, and then the state of the checkpoint that is resumed."""
        with self._calling("setup"):
            await self.loop.setup()
        if state is not None:
            with self._calling("load_state_dict"):
                self.loop.load_state_dict(msgspec.msgpack.decode(state, strict=False))

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """What the loop's own code raises is a contract error with the method's name (LOOP-15)."""
        try:
            yield
        except AgrpoError:
            raise
        except Exception as error:
            raise ContractError(f"{self._name}: {method} raised {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        try:
            await self.loop.close()
        except Exception as error:
            _log.warning("%s: close raised %s: %s", self._name, type(error).__name__, error)

    def state(self) -> bytes | None:
        """`state_dict` as bytes; None where the loop keeps nothing."""
        try:
            state = self.loop.state_dict()
            return None if state is None else msgspec.msgpack.encode(state, enc_hook=_plain)
        except (TypeError, ValueError, OverflowError) as error:
            raise ContractError(f"{self._name}: state_dict must give plain values: {error}") from error
        except Exception as error:
            raise ContractError(f"{self._name}: state_dict raised {type(error).__name__}: {error}") from error

    def accepts(self, prompt: Prompt, num_rows: int | None) -> bool:
        """`filter_prompt`. StallError where a whole epoch of `num_rows` prompts is rejected (LOOP-3)."""
        try:
            accepted = bool(self.loop.filter_prompt(prompt.row_index, row_of(prompt), prompt.epoch))
        except Exception as error:
            raise ContractError(f"{self._name}: filter_prompt raised {type(error).__name__}: {error}") from error
        if not accepted:
            self._rejected[prompt.epoch] += 1
            # After the last epoch the trainer is done: it needs no more prompts.
            if self._rejected[prompt.epoch] == num_rows and prompt.epoch != self._last_epoch:
                raise StallError(
                    f"{self._name}: filter_prompt rejected all {num_rows} prompts of epoch {prompt.epoch}, so no step can follow"
                )
        return accepted

    def judged(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """[usable rollouts] total rewards and advantages after `compute_advantages`."""
        shown = group_of(group)
        with self._calling("compute_advantages"):
            given = self.loop.compute_advantages(shown)
        totals = np.asarray(shown.rewards, np.float64)
        return totals, checked(given, totals, f"{type(self.loop).__qualname__}.compute_advantages")

    def _default_advantages(self, group: RolloutGroup) -> np.ndarray:
        advantage, limit = self._config.advantage, self._config.sampler.max_completion_length
        return advantage.of(advantage.scores(group.group, limit, totals=group.rewards))

    def player(self, player: Any) -> Any:
        """The player that calls what the loop overrides; `player` itself where that is nothing."""
        cls = type(self.loop)
        if overrides(cls, "generate_one"):
            return OwnRollouts(player, self)
        return OwnTurns(player, self) if overrides(cls, "generate_one_turn") else player

    async def within_limit(self, work: Awaitable[Any]) -> Any:
        """The result of a rollout's own code; RolloutFailure where it takes too long."""
        limit = self._config.rollout.agent.time_limit
        try:
            async with asyncio.timeout(limit) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"generate_one took longer than rollout.agent.time_limit={limit:g} s"
            raise RolloutFailure("timeout", text) from None

    def asking(self, generate: Callable[..., Awaitable[Turn]], version: int) -> Callable[..., Awaitable[Turn]]:
        """`generate` through the loop's `generate_one_turn`, where it has its own."""
        if not overrides(type(self.loop), "generate_one_turn"):
            return generate

        async def ask(ids: np.ndarray, key: tuple[int, int, int], max_tokens: int | None = None) -> Turn:
            # The request of a chat already has its number; one that the method repeats counts on from there.
            limited = functools.partial(generate, max_tokens=max_tokens)
            token = _playing.set(Play(limited, key[0], key[1], num_turns=key[2]))
            try:
                record = await self.loop.generate_one_turn(ids.tolist())
            finally:
                _playing.reset(token)
            return self._needs.turn(record, version, f"{self._name}.generate_one_turn")

        return ask


class OwnTurns:
    """A player whose requests go through the loop's `generate_one_turn`."""

    def __init__(self, player: Any, custom: Custom):
        self._player, self._custom = player, custom

    def __getattr__(self, name: str) -> Any:
        return getattr(self._player, name)

    async def play(self, prompt: Prompt, generate: Any, group_id: int, slot: int, prompt_ids: Any = None) -> Played:
        own = self._custom.asking(generate, self._custom._version())
        return await self._player.play(prompt, own, group_id, slot, prompt_ids)


class OwnRollouts(OwnTurns):
    """A player that leaves the whole rollout to the loop's `generate_one`."""

    async def play(self, prompt: Prompt, generate: Any, group_id: int, slot: int, prompt_ids: Any = None) -> Played:
        custom, version = self._custom, self._custom._version()
        own = custom.asking(generate, version)
        async with self._player.stage(prompt, group_id, slot, prompt_ids) as stage:
            token = _playing.set(Play(generate, group_id, slot, stage, own))
            try:
                given = await custom.within_limit(custom.loop.generate_one(stage.messages, stage.tools, group_id))
            finally:
                _playing.reset(token)
            played = custom._needs.rollout(given, version, f"{custom._name}.generate_one", self._player.eos_ids)
            return await stage.rewarded(played)


def _plain(value: Any) -> Any:
    """numpy's scalars as numbers; anything else cannot be stored."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no number, text, list or mapping")


def open_custom(config: Any, tokenizer: Any, version: Callable[[], int]) -> Custom | None:
    """The loop that `rollout.loop` names; None where it names none. ConfigError as `problems`."""
    if config.rollout.loop is None:
        return None
    lines = problems(config)
    if lines:
        raise ConfigError(lines)
    cls = locate(config.rollout.loop)
    try:
        loop = cls()
    except Exception as error:
        raise ContractError(f"rollout.loop: {config.rollout.loop}() raised {type(error).__name__}: {error}") from error
    return Custom(loop, config, tokenizer, version)

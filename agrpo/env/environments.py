"""The user's environments: made when needed, lent to one rollout at a time, reset and lent again (ENV-1 to ENV-17)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import numbers
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agrpo.config import locate
from agrpo.env.threads import Threads
from agrpo.env.toolbox import Toolbox
from agrpo.env.tools import Tool, methods_of, tool_of
from agrpo.errors import ConfigError, RolloutFailure

_log = logging.getLogger(__name__)
ROUTE = "environment"  # the column that names a row's environment


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of environment: how to make an instance, and what the model may call on it."""

    name: str  # as the mapping names it; empty for a single factory
    factory: Callable[[], Any]
    cls: type
    tools: dict[str, Tool]

    @property
    def source(self) -> str:
        """The name of its reward (ENV-10)."""
        return self.cls.__name__

    @property
    def has_reward(self) -> bool:
        return callable(getattr(self.cls, "get_reward", None))


def kinds_of(factory: Any) -> dict[str, Kind]:
    """Name -> kind for `env.factory`; a single one has the name "". ConfigError with every fault."""
    named = factory if isinstance(factory, Mapping) else {"": factory}
    kinds, lines = {}, []
    if not named:
        lines.append("env.factory is an empty mapping; name at least one environment, or leave it null")
    for name, path in named.items():
        key = f"env.factory.{name}" if name else "env.factory"
        try:
            kinds[str(name)] = _kind(str(name), path, key)
        except ConfigError as error:
            lines += error.problems
    if lines:
        raise ConfigError(lines)
    return kinds


def _kind(name: str, path: Any, key: str) -> Kind:
    if not isinstance(path, str):
        raise ConfigError(f"{key} must be the import path of a class or function, got {path!r}")
    try:
        factory = locate(path)
    except ConfigError as error:
        raise ConfigError([f"{key}: {line}" for line in error.problems]) from error
    qualified = getattr(factory, "__qualname__", "")
    if "<lambda>" in qualified or "<locals>" in qualified:
        kind = "a lambda" if "<lambda>" in qualified else "defined inside a function"
        raise ConfigError(f"{key}: {path} is {kind}; write it with class or def in a module")
    if not callable(factory):
        raise ConfigError(
            f"{key}: {path} is of type {type(factory).__name__}; give a class, or a function without arguments"
        )
    needed = _needed_arguments(factory)
    if needed:
        raise ConfigError(f"{key}: {path} needs the argument {needed[0]}; it is called without any")
    cls = factory if isinstance(factory, type) else _returned_class(factory)
    if cls is None:
        cls = _class_of_one(factory, key, path)
    return Kind(name, factory, cls, tools_of(cls, f"{key}: {path}"))


def _needed_arguments(factory: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def _returned_class(factory: Callable[..., Any]) -> type | None:
    try:
        returned = inspect.get_annotations(factory, eval_str=True).get("return")
    except Exception:
        return None
    return returned if isinstance(returned, type) else None


def _class_of_one(factory: Callable[[], Any], key: str, path: str) -> type:
    """The class that a function without a return type makes: one is made to look at it."""
    try:
        return type(factory())
    except Exception as error:
        raise ConfigError(f"{key}: {path}() raised {type(error).__name__}: {error}".replace("\n", " ")) from error


def tools_of(cls: type, label: str) -> dict[str, Tool]:
    """The public methods of an environment class as tools; ConfigError names the method and what it lacks."""
    lines = []
    if not callable(getattr(cls, "reset", None)):
        lines.append(f"{label} has no method reset; an environment needs reset(self, **columns)")
    tools = {}
    for name, method in methods_of(cls).items():
        try:
            tools[name] = tool_of(method, f"{label}: method {name}")
        except ConfigError as error:
            lines += error.problems
    if lines:
        raise ConfigError(lines)
    return tools


@dataclass(slots=True)
class Pool:
    """The instances of one kind. An instance is lent to one rollout, and comes back or is discarded (ENV-3, ENV-4)."""

    kind: Kind
    threads: Threads
    reuses: bool
    limit_s: float | None = None  # for one call of its constructor, `reset` or `get_reward`
    idle: list[Any] = field(default_factory=list)
    num_made: int = 0

    async def lease(self) -> Any:
        """An instance nobody else holds; RolloutFailure where its constructor raises."""
        if self.idle:
            return self.idle.pop()
        async with self.within_limit("env_create", f"{self.kind.source}()"):
            instance = await self.threads.run(self.kind.factory)
            await self._enter(instance)
        self.num_made += 1
        return instance

    @contextlib.asynccontextmanager
    async def within_limit(self, reason: str, what: str) -> AsyncIterator[None]:
        """RolloutFailure for what its code raises, and where it takes too long; a thread that hangs in it is given up."""
        limit = asyncio.timeout(self.limit_s)
        try:
            async with limit:
                yield
        except Exception as error:
            if limit.expired():
                text = f"{what} took longer than env.time_limit={self.limit_s:g} s"
                raise RolloutFailure(reason, text) from None
            raise RolloutFailure(reason, _text(what, error)) from error

    async def give_back(self, instance: Any, is_healthy: bool) -> None:
        if is_healthy and self.reuses:
            self.idle.append(instance)
        else:
            await self._release(instance)

    async def close(self) -> None:
        while self.idle:
            await self._release(self.idle.pop())

    async def _enter(self, instance: Any) -> None:
        for name in ("__aenter__", "__enter__"):
            if hasattr(type(instance), name):
                await self.threads.run(getattr(instance, name))
                return

    async def _release(self, instance: Any) -> None:
        """An environment that is a context manager is left; that it cannot be is worth a line, not the run."""
        for name in ("__aexit__", "__exit__"):
            if hasattr(type(instance), name):
                try:
                    await self.threads.run(getattr(instance, name), None, None, None)
                except Exception as error:
                    _log.warning("leaving an environment: %s", _text(f"{self.kind.source}.{name}", error))
                return


class Visit:
    """One rollout's use of one instance: reset, tools, reward, and back to the pool."""

    def __init__(self, pool: Pool, instance: Any):
        self._pool, self._instance = pool, instance
        self._is_healthy = True  # false while its code runs: a cancelled rollout may leave a thread at work in it
        self.reset_s: float | None = None
        self.reward_s: float | None = None

    @property
    def kind(self) -> Kind:
        return self._pool.kind

    @property
    def cls(self) -> type:
        return type(self._instance)

    def bound(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self._instance, name) for name in self.kind.tools}

    async def reset(self, columns: dict[str, Any]) -> str:
        """What `reset` says, empty if nothing (ENV-6); RolloutFailure where it raises or returns anything else."""
        seconds: list[float] = []
        self._is_healthy = False
        async with self._pool.within_limit("env_reset", f"{self.kind.source}.reset"):
            said = await self._pool.threads.timed(
                self._instance.reset, (), _accepted(self._instance.reset, columns), seconds
            )
        self.reset_s = sum(seconds)
        if said is not None and not isinstance(said, str):
            text = f"{self.kind.source}.reset returned {type(said).__name__}; it must return a string or None"
            raise RolloutFailure("env_reset", text)
        self._is_healthy = True
        return said or ""

    async def reward(self) -> float | None:
        """What `get_reward` says; None where the environment has none (ENV-8)."""
        if not callable(getattr(self._instance, "get_reward", None)):
            return None
        seconds: list[float] = []
        was_healthy, self._is_healthy = self._is_healthy, False
        async with self._pool.within_limit("env_reward", f"{self.kind.source}.get_reward"):
            value = await self._pool.threads.timed(self._instance.get_reward, (), {}, seconds)
        self.reward_s = sum(seconds)
        if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
            text = f"{self.kind.source}.get_reward returned {type(value).__name__}; it must return a number"
            raise RolloutFailure("env_reward", text)
        if not math.isfinite(value):
            raise RolloutFailure("env_reward", f"{self.kind.source}.get_reward returned {value}; it must be finite")
        self._is_healthy = was_healthy
        return float(value)

    @contextlib.contextmanager
    def working(self, toolbox: Toolbox) -> Iterator[None]:
        """While the tools of a message run; an instance in which one still runs afterwards is not lent again."""
        self._is_healthy = False
        yield
        self._is_healthy = not toolbox.has_timed_out_method

    async def end(self) -> None:
        await self._pool.give_back(self._instance, self._is_healthy)


def _accepted(reset: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The columns that `reset` takes: all of them with **kwargs, else those it names."""
    names = accepted_names(reset)
    return columns if names is None else {name: value for name, value in columns.items() if name in names}


@functools.lru_cache(maxsize=64)
def _names_of(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Keyword names a function or method takes; None = any."""
    return _names_of(getattr(function, "__func__", function))


def _text(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {error}"

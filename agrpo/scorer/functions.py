"""Rewards from the user's functions, named by import path (REW)."""

from __future__ import annotations

import array
import asyncio
import dataclasses
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agrpo.errors import ConfigError, ContractError
from agrpo.schema import setting
from agrpo.scorer.contract import Request, ScoreError, checked, keywords
from agrpo.scorer.entries import Entry, EntryError, is_async, names, resolve, usage_problems
from agrpo.scorer.pool import Pool
from agrpo.scorer.worker import execute
from agrpo.types import Group, Rollout

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Functions:
    """Reward functions called once per group; a rollout's reward is the sum of what they return."""

    functions: Any = setting(
        factory=list, doc="import paths pkg.mod.name, or {_target_: pkg.mod.name, <arguments>}; one or a list"
    )
    queue_size: int = setting(16, "finished groups that may wait for scoring before generation is held", ge=1)
    max_concurrent_groups: int = setting(8, "groups scored at the same time; 1 = strictly one after the other", ge=1)
    timeout: float | None = setting(60.0, "seconds one function may take for one group; null = no limit", gt=0)
    on_error: str = setting(
        "drop_group", "when a function raises or exceeds the limit", choices=("drop_group", "abort")
    )
    executor: str = setting("process", "where synchronous functions run", choices=("thread", "process"))
    reward_range: list[float] | None = setting(None, "[lowest, highest] possible reward, for the saturation verdict")

    def entries(self) -> list[Entry]:
        """The entries as a list; a single one may be given without brackets."""
        if isinstance(self.functions, str | Mapping):
            return [self.functions]
        return list(self.functions or [])

    def resolve(self, taken: Sequence[str] = ()) -> list[tuple[str, Callable]]:
        """Metric name and callable of every entry; `taken` are names of other reward sources. ConfigError lists all faults."""
        targets, lines = self._targets()
        if lines:
            raise ConfigError(lines)
        return list(zip(names(targets, taken), targets, strict=True))

    def _targets(self) -> tuple[list[Callable], list[str]]:
        targets, lines = [], []
        for entry in self.entries():
            try:
                targets.append(resolve(entry))
            except EntryError as error:
                lines.append(str(error))
        return targets, lines

    def problems(self, config: Any) -> list[str]:
        lines = self._range_problems()
        if not self.entries() and not _other_source(config):
            lines.append(
                "scorer.functions is empty and nothing else gives rewards; name a function, for example "
                "scorer.functions=[agrpo.scorer.rewards.accuracy_reward], or an environment with get_reward (env.factory)"
            )
        columns = getattr(config.data, "columns", lambda: None)()
        return lines + self._function_problems(columns)

    def _function_problems(self, columns: Sequence[str] | None) -> list[str]:
        lines = []
        for entry in self.entries():
            try:
                target = resolve(entry)
            except EntryError as error:
                lines.append(str(error))
                continue
            path = entry["_target_"] if isinstance(entry, Mapping) else entry
            lines += usage_problems(path, target, columns)
        return lines

    def _range_problems(self) -> list[str]:
        span = self.reward_range
        if span is not None and (len(span) != 2 or not span[0] < span[1]):
            return [f"scorer.reward_range must be [lowest, highest] with lowest < highest, got {list(span)}"]
        return []

    async def open(self, columns: Sequence[str] | None = None, taken: Sequence[str] = ()) -> Live:
        """Start the workers and import the functions; `columns` as opened by the data, `taken` as in `resolve`."""
        lines = self._function_problems(columns)
        if lines:
            raise ConfigError(lines)
        sources = [
            Source(name, function, entry, is_async(function))
            for (name, function), entry in zip(self.resolve(taken), self.entries(), strict=True)
        ]
        live = Live(self, sources)
        await live.start()
        return live


def _other_source(config: Any) -> bool:
    """An environment, a workflow or a loop of the user's own may give the reward (REW-1)."""
    rollout = config.rollout
    return any(
        [getattr(config.env, "factory", None), getattr(rollout, "workflow", None), getattr(rollout, "loop", None)]
    )


@dataclass(frozen=True, slots=True)
class Source:
    """One reward function under its metric name."""

    name: str
    function: Callable
    entry: Entry
    is_async: bool


class Live:
    """The open scorer; `score` may be called for many groups at once. `close` before the event loop ends."""

    def __init__(self, settings: Functions, sources: list[Source]):
        self._settings, self._sources = settings, sources
        self._slots = asyncio.Semaphore(settings.max_concurrent_groups)
        self._in_processes = [s for s in sources if not s.is_async] if settings.executor == "process" else []
        self._pool: Pool | None = None
        self.function_seconds = {s.name: 0.0 for s in sources}  # time inside each function so far
        self.function_calls = {s.name: 0 for s in sources}
        self._measured: list[tuple[str, float, float]] = []

    @property
    def names(self) -> list[str]:
        return [s.name for s in self._sources]

    @property
    def worker_pids(self) -> list[int]:
        return self._pool.worker_pids if self._pool else []

    async def start(self) -> None:
        if not self._in_processes:
            return
        count = len(self._in_processes)
        bound = min(self._settings.max_concurrent_groups * count, MAX_WORKERS)
        functions = [(s.name, s.entry) for s in self._in_processes]
        self._pool = Pool(functions, initial=max(count, os.cpu_count() or 1), bound=bound)
        try:
            await self._pool.open()
        except BaseException:
            await self._pool.close()
            raise

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def score(self, group: Group) -> Group:
        """The group with the functions' rewards added to its usable rollouts. ScoreError: drop it; ContractError: end the run."""
        usable = group.usable
        if not usable or not self._sources:
            return group
        async with self._slots:
            request = _request(group, usable)
            body = pickle.dumps(request, pickle.HIGHEST_PROTOCOL) if self._in_processes else b""
            calls = [self._call(source, request, body) for source in self._sources]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        self._raise_worst(outcomes)
        return _with_rewards(group, dict(zip(self.names, outcomes, strict=True)))

    async def _call(self, source: Source, request: Request, body: bytes) -> list[float | None]:
        if source.is_async:
            values, seconds = await self._await(source, request)
        else:
            values, seconds = _values(source.name, await self._execute(source, request, body))
        self.function_seconds[source.name] += seconds
        self.function_calls[source.name] += 1
        self._measured.append((f"rewards/{source.name}/call_s", seconds, 1))
        return values

    def take_measured(self) -> list[tuple[str, float, float]]:
        """Metric events of the calls since this was asked last: name, value, weight."""
        taken, self._measured = self._measured, []
        return taken

    async def _execute(self, source: Source, request: Request, body: bytes) -> tuple[Any, ...]:
        if self._pool is not None:
            return await self._pool.call(self._in_processes.index(source), body, self._settings.timeout)
        try:
            return await asyncio.wait_for(
                _in_thread(execute, source.name, source.function, request), self._settings.timeout
            )
        except TimeoutError:
            raise self._too_slow(source, "its thread cannot be stopped, use scorer.executor=process") from None

    async def _await(self, source: Source, request: Request) -> tuple[list[float | None], float]:
        started = time.perf_counter()
        limit = asyncio.timeout(self._settings.timeout)
        try:
            async with limit:
                values = await source.function(**keywords(request))
        except Exception as error:
            if limit.expired():
                raise self._too_slow(source, "it was cancelled") from None
            raise ScoreError(
                "raised", f"reward function {source.name} raised {type(error).__name__}: {error}"
            ) from error
        return checked(source.name, values, len(request.completions)), time.perf_counter() - started

    def _too_slow(self, source: Source, ending: str) -> ScoreError:
        return ScoreError(
            "timeout", f"reward function {source.name} exceeded scorer.timeout={self._settings.timeout:g} s; {ending}"
        )

    def _raise_worst(self, outcomes: Sequence[Any]) -> None:
        """A broken contract ends the run even if another function only failed; anything unforeseen is not hidden."""
        faults = [o for o in outcomes if isinstance(o, BaseException)]
        for fault in sorted(faults, key=lambda f: isinstance(f, ScoreError)):
            if isinstance(fault, ScoreError) and self._settings.on_error == "abort":
                raise ContractError(f"{fault.text} (scorer.on_error=abort)") from fault
            raise fault


def _request(group: Group, usable: list[Rollout]) -> Request:
    ids = [array.array("i") for _ in usable]
    for joined, rollout in zip(ids, usable, strict=True):
        joined.extend(rollout.extras.get("completion_ids", ()))  # where a loop of the user's own says what they are
        for turn in rollout.turns if "completion_ids" not in rollout.extras else ():
            joined.frombytes(turn.output_ids.astype("int32", copy=False).tobytes())
    changed = any(r.prompt is not None for r in usable)
    own = [r.prompt if r.prompt is not None else group.prompt.messages for r in usable] if changed else None
    return Request(group.prompt.messages, group.prompt.columns, [r.completion for r in usable], ids, own)


def _values(name: str, answer: tuple[Any, ...]) -> tuple[list[float | None], float]:
    """Values and seconds of a call executed in a process or thread."""
    if answer[0] == "ok":
        return answer[1], answer[2]
    if answer[0] == "contract":
        raise ContractError(answer[1])
    raise ScoreError("raised", f"{answer[1]}\n{answer[2].rstrip()}")


def _with_rewards(group: Group, values: dict[str, list[float | None]]) -> Group:
    """Values are in the order of the usable rollouts; unusable ones stay as they are."""
    rollouts, index = [], 0
    for rollout in group.rollouts:
        if rollout.failure is None:
            rewards = {**rollout.rewards, **{name: listed[index] for name, listed in values.items()}}
            rollout, index = dataclasses.replace(rollout, rewards=rewards), index + 1
        rollouts.append(rollout)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


async def _in_thread(function: Callable, *arguments: Any) -> Any:
    """Run in a daemon thread of its own: a hung function then delays neither the pool's others nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def settle(result: Any) -> None:
        if not future.done():
            future.set_result(result)

    def body() -> None:
        result = function(*arguments)  # `execute` returns every exception as a value
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=body, name="reward", daemon=True).start()
    return await future

"""The tools of one rollout, and the calls it makes with them: in order, within the time limit, every failure answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agrpo.env.threads import Threads
from agrpo.env.tools import BadArguments, Tool, as_text

Event = tuple[str, float, float]  # name, value and weight of a metric event


@dataclass(slots=True)
class Toolbox:
    """`answer` gives the tool messages for the calls of one assistant message, and keeps count."""

    tools: dict[str, Tool]
    threads: Threads
    timeout_s: float | None
    bound: dict[str, Callable[..., Any]]  # methods of this rollout's environment instance, by name
    num_calls: int = 0
    num_failed: int = 0
    has_timed_out_method: bool = False  # the instance may still be at work in an abandoned thread
    events: list[Event] = field(default_factory=list)

    async def answer(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One message per call, in order of the calls (TOOL-4, TOOL-6)."""
        self._record("tools/parallel_calls_mean", len(calls))
        messages = []
        for call in calls:
            name = call["function"]["name"]
            seconds: list[float] = []
            try:
                content, failed = await self._result(name, call["function"]["arguments"], seconds), False
            except _Failed as failure:
                content, failed = f"error: {failure}", True
            self._count(name, sum(seconds), failed)
            messages.append({"role": "tool", "name": name, "content": content, "tool_call_id": call.get("id")})
        return messages

    async def _result(self, name: str, arguments: dict[str, Any], seconds: list[float]) -> str:
        tool = self.tools.get(name)
        if tool is None:
            offered = ", ".join(self.tools) or "none"
            raise _Failed(f"there is no tool {name}; the tools are: {offered}")
        function = self.bound.get(name, tool.function)
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return as_text(await self.threads.timed(function, (), tool.fit(arguments), seconds))
        except BadArguments as error:
            raise _Failed(str(error)) from error
        except Exception as error:
            if limit.expired():
                self.has_timed_out_method |= name in self.bound
                seconds[:] = [self.timeout_s]
                raise _Failed(f"{name} gave no result in {self.timeout_s:g} s") from error
            raise _Failed(f"{type(error).__name__}: {error}") from error

    def _count(self, name: str, seconds: float, failed: bool) -> None:
        self.num_calls += 1
        self.num_failed += failed
        if name not in self.tools:
            self._record("tools/unknown_name_count", 1)
            return
        self._record("tools/latency_s", seconds)
        self._record(f"tools/{name}/latency_s", seconds)
        self._record(f"tools/{name}/call_count", 1)
        self._record(f"tools/{name}/failure_count", float(failed))

    def _record(self, name: str, value: float) -> None:
        self.events.append((name, float(value), 1.0))

    def summary(self, loop_exhausted: bool) -> tuple[Event, ...]:
        """All metric events of a finished rollout."""
        return (
            *self.events,
            ("tools/call_frequency", float(self.num_calls), 1.0),
            ("tools/failure_frequency", float(self.num_failed), float(self.num_calls)),
            ("tools/loop_exhausted_frac", float(loop_exhausted), 1.0),
        )


class _Failed(Exception):
    """A call without a result; the text is what the model reads."""

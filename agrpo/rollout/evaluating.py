"""Evaluations beside the production of groups: asked for by the trainer, first in line for places, one version each.

The trainer leaves the weights as they are while one generates. Before it changes them all the same it sends StopEval:
rollouts that still generate are then given up, and the evaluation they belong to ends without a result.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from agrpo.errors import RolloutFailure
from agrpo.eval import Evaluation, Result
from agrpo.types import Group, Prompt, Rollout, Turn

if TYPE_CHECKING:
    from agrpo.rollout.staleness import Running

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """An evaluation with what it works on; `scorer` is its own, None the run's."""

    evaluation: Evaluation
    prompts: Any
    scorer: Any = None


@dataclass(slots=True, eq=False)
class EvaluationWindow:
    """The version an evaluation was asked at; over once it is stopped. In place of a `VersionWindow`."""

    asked_at: int
    is_stopped: bool = False
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)  # for places

    async def gets(self, place: asyncio.Future[None]) -> bool:
        """Whether the place was given before the evaluation was stopped."""
        self._waiting.add(place)
        try:
            await place
        except RolloutFailure:
            return False
        finally:
            self._waiting.discard(place)
        return True

    def stop(self) -> None:
        self.is_stopped = True
        for place in self._waiting:
            if not place.done():
                place.set_exception(RolloutFailure("stale", "the evaluation was given up"))

    def version(self) -> int:
        return self.asked_at

    def is_over(self, running: Running) -> bool:
        return self.is_stopped

    def text(self, running: Running) -> str:
        return f"the evaluation of version {self.asked_at} was given up, the weights change"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an evaluation wants of a rollout."""

    window: EvaluationWindow
    temperature: float
    max_tokens: int | None  # of one answer; None = as many as the player asks for

    def of(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        async def ask(prompt_ids: Any, key: Any, max_tokens: int | None = None, **options: Any) -> Turn:
            limits = [limit for limit in (max_tokens, self.max_tokens) if limit is not None]
            options = {"temperature": self.temperature, **options}
            return await generate(prompt_ids, key, max_tokens=min(limits, default=None), **options)

        return ask


class _Reasons:
    """Why rollouts gave no reward: how often each reason, and what was said of it last."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._texts: dict[str, str] = {}

    def add(self, reason: str, text: str) -> None:
        self._counts[reason] += 1
        self._texts[reason] = " ".join(text.split())

    def text(self) -> str:
        for reason, count in self._counts.most_common(1):
            return f"most often ({count} times) {reason}: {self._texts[reason]}"
        return "every reward function returned None for all of them"


class Evaluating:
    """Runs the evaluations that are asked for, one after the other."""

    def __init__(self, opened: Mapping[str, Opened], slots: Any, judge: Any, progress: Callable[[str], None]):
        self._opened, self._slots, self._judge, self._progress = opened, slots, judge, progress
        self._windows: set[EvaluationWindow] = set()
        self._turn = asyncio.Lock()  # evaluations share their group ids
        self.unscored: dict[str, str] = {}  # evaluation -> why no rollout of it was scored, the last time

    def due_at_start(self) -> list[str]:
        return [name for name, opened in self._opened.items() if opened.evaluation.at_start]

    async def run(self, names: Sequence[str], version: int, send: Callable[[str, Result], Any]) -> None:
        """Play each and send what it came to; {} for one that was given up."""
        window = EvaluationWindow(version)
        self._windows.add(window)
        try:
            async with self._turn:
                for name in names:
                    result = {} if window.is_stopped else await self._result(name, window)
                    if not result:
                        _log.warning("evaluation %s of version %d was given up: the weights changed", name, version)
                    await send(name, result)
        finally:
            self._windows.discard(window)

    async def _result(self, name: str, window: EvaluationWindow) -> Result:
        opened, failures = self._opened[name], _Reasons()
        evaluation = opened.evaluation
        asked = Asked(window, evaluation.temperature, evaluation.max_completion_length)

        async def play(prompt: Prompt, group_id: int, slot: int) -> Rollout:
            rollout = await self._slots.play(prompt, group_id, slot, asked)
            if rollout.failure is not None:
                failures.add(rollout.failure, rollout.failure_text)
            self._progress("evaluating")
            return rollout

        async def score(group: Group) -> Group:
            scored = await self._judge.score(group, opened.scorer, lambda error: failures.add("scorer_error", str(error)))
            self._progress("evaluating")
            return scored

        result = await evaluation.run(opened.prompts, play, score, window.asked_at)
        self.unscored.pop(name, None)
        if result and not result["rollouts_count"]:
            self.unscored[name] = f"no rollout of evaluation {name} was scored; {failures.text()}"
            _log.warning("%s", self.unscored[name])
        return result

    def stop(self) -> None:
        """Give up what still generates."""
        for window in self._windows:
            window.stop()
        self._slots.give_up_stale()

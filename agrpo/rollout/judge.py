"""From a finished group to a ready one: size rules, scoring, advantages, stitching; or the reason why it is dropped.

Finished groups wait in a queue of `scorer.queue_size`; while it is full no rollout starts (ARCH-11). Up to
`scorer.max_concurrent_groups` groups are scored at the same time (REW-15).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agrpo.advantage import Scores
from agrpo.env.stitch import stitch
from agrpo.env.threads import Threads
from agrpo.errors import AgrpoError, ContractError
from agrpo.rollout import report
from agrpo.rollout.completions import CompletionLog
from agrpo.rollout.concurrency import Places
from agrpo.rollout.custom import Custom
from agrpo.rollout.dump import Dump
from agrpo.rollout.unscored import Unscored
from agrpo.types import Group, ReadyGroup

_log = logging.getLogger(__name__)


class Dropped(Exception):
    """The group ends here; `reason` is what the ledger counts it under."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass(slots=True)
class _Judged:
    """How far a group has come: scored or not, with the advantages of its rows where they are known."""

    group: Group
    advantages: np.ndarray | None = None


class Judge:
    """`ready(group)` is a ReadyGroup, or raises Dropped."""

    def __init__(
        self,
        scorer: Any,
        advantage: Any,
        settings: Any,
        max_completion_length: int,
        queue_size: int,
        max_concurrent_groups: int,
        accept: Callable[[Group], Any] | None,
        window: Any,
        completions: CompletionLog | None = None,
        dump: Dump | None = None,
        custom: Custom | None = None,
        merged: Callable[[Group], Any] = lambda group: group,
        unscored: Unscored | None = None,
    ):
        """`merged` is the form in which `accept` sees a group."""
        self._custom = custom if custom is not None and custom.computes_advantages else None
        self._merged = merged
        self._completions, self._dump = completions, dump
        self._scorer, self._advantage, self._settings, self._window = scorer, advantage, settings, window
        self._max_completion_length, self._accept = max_completion_length, accept
        self._queue_size = queue_size
        self._queue = asyncio.Semaphore(queue_size)
        self._scoring = asyncio.Semaphore(max_concurrent_groups)
        self.num_waiting = 0  # groups in the score queue
        self.num_scoring = 0
        self._unscored = unscored if unscored is not None else Unscored()
        self._threads = Threads()  # for `accept`

    async def ready(self, group: Group, places: Places) -> ReadyGroup:
        judged = _Judged(group)
        try:
            ready = await self._judged(judged, places)
        except Dropped as dropped:
            await self._record(judged, dropped.reason)
            raise
        await self._record(judged, None)
        return ready

    async def _record(self, judged: _Judged, dropped: str | None) -> None:
        if self._dump is not None:
            await self._dump.write(judged.group, dropped=dropped, advantages=judged.advantages)

    async def _judged(self, judged: _Judged, places: Places) -> ReadyGroup:
        self._check_size(judged.group)
        judged.group = scored = await self._after_queue(judged.group, places)
        scores, advantages, of_rows = self._advantages(scored)
        judged.advantages = None if self._advantage.needs_step else of_rows
        # Decided on the rewards, never on the advantages: no advantage function can save a group without signal (ADV-6).
        reason = self._advantage.drop_reason(scores.references)
        report.record_scored(self._window, scored, self._advantage.has_signal(scores.references), reason is not None)
        if self._completions is not None:
            self._completions.write(scored, None if self._advantage.needs_step else advantages, reason)
        if reason is not None:
            raise Dropped(reason)
        await self._check_accepted(scored)
        ready = ready_group(scored, scores, of_rows)
        if not self._advantage.needs_step:
            ready = _over_tokens(ready, self._advantage)
        if not ready.samples:
            raise Dropped("no_trained_token")
        return ready

    def _advantages(self, group: Group) -> tuple[Scores, np.ndarray, np.ndarray]:
        """What they come from, and the advantages of the usable rollouts and of their rows."""
        advantage, limit = self._advantage, self._max_completion_length
        if self._custom is None:
            scores = advantage.scores(group, limit)
            return scores, advantage.of(scores), advantage.of_rows(scores)
        totals, given = self._custom.judged(group)
        scores = advantage.scores(group, limit, totals)
        # A value that the loop passes on leaves the rows of its rollout their own; any other holds for all of them.
        is_own = np.repeat(given != advantage.of(scores), scores.row_counts)
        return scores, given, np.where(is_own, np.repeat(given, scores.row_counts), advantage.of_rows(scores))

    def _check_size(self, group: Group) -> None:
        """Enough usable rollouts to learn from (AREAL-WF-43, 45)."""
        num_slots, num_usable = len(group.rollouts), len(group.usable)
        minimum = self._advantage.minimum_usable(num_slots, self._settings.min_usable_group_size)
        incomplete = self._settings.drop_incomplete_group and num_usable < num_slots
        if incomplete or num_usable < minimum:
            if not num_usable:
                self._window.add("group/rejected_count", 1)
            report.record_trainable(self._window, 0, num_slots)
            raise Dropped("incomplete" if incomplete else "unusable")
        report.record_trainable(self._window, num_usable, num_slots)

    async def _after_queue(self, group: Group, places: Places) -> Group:
        began = time.monotonic()
        is_full = self._queue.locked()
        if is_full:
            places.hold()
        try:
            await self._queue.acquire()
        finally:
            if is_full:
                places.let_go()
        entered = time.monotonic()
        self._window.add("rollout/score_block_s", entered - began)
        self.num_waiting += 1
        async with self._scoring:
            self.num_waiting -= 1
            self._queue.release()
            started = time.monotonic()
            try:
                scored = await self._rewarded(group, self._scorer)
            except Dropped as dropped:
                self._unscored.failed(dropped.__cause__)
                raise
            self._unscored.scored()
        for event in getattr(self._scorer, "take_measured", list)():
            self._window.add(*event)
        self._window.add("rollout/score_wait_s", started - entered, 1)
        self._window.add("rollout/score_s", time.monotonic() - started, 1)
        return scored

    async def score(
        self, group: Group, scorer: Any = None, failed: Callable[[BaseException | None], None] = lambda error: None
    ) -> Group:
        """The group of an evaluation with rewards, of its own scorer if it has one; without any where scoring `failed`."""
        async with self._scoring:
            try:
                group = await self._rewarded(group, scorer or self._scorer)
            except Dropped as dropped:
                failed(dropped.__cause__)
        if self._dump is not None:
            await self._dump.write(group, is_eval=True)
        return group

    async def _rewarded(self, group: Group, scorer: Any) -> Group:
        self.num_scoring += 1
        try:
            return await scorer.score(group)
        except AgrpoError:
            raise
        except Exception as error:
            _log.warning("group %d was not scored: %s", group.group_id, error)
            raise Dropped("scorer_error") from error
        finally:
            self.num_scoring -= 1

    async def _check_accepted(self, group: Group) -> None:
        if self._accept is None:
            return
        accepted = await self._threads.run(self._is_accepted, group)
        self._window.add("group/accepted_count" if accepted else "group/rejected_count", 1)
        if not accepted:
            raise Dropped("rejected")

    def _is_accepted(self, group: Group) -> bool:
        try:
            return bool(self._accept(self._merged(group)))
        except Exception as error:
            raise ContractError(f"rollout.accept_fn raised {type(error).__name__}: {error}") from error


def ready_group(group: Group, scores: Scores, advantages: np.ndarray) -> ReadyGroup:
    """The samples of a scored group; `advantages` [rows of its usable rollouts]. Unusable rollouts give none (ADV-10)."""
    slots = [slot for slot, rollout in enumerate(group.rollouts) if rollout.failure is None]
    usable, ends = group.usable, np.cumsum(scores.row_counts)
    rows = [slice(end - count, end) for end, count in zip(ends, scores.row_counts, strict=True)]
    samples = [
        sample
        for slot, rollout, own in zip(slots, usable, rows, strict=True)
        for sample in stitch(rollout, advantages[own], group.group_id, slot, scores.rows[own])
    ]
    names = {name: None for rollout in usable for name in rollout.rewards}
    sources = {name: np.array([_number(r.rewards.get(name)) for r in usable], np.float64) for name in names}
    return ReadyGroup(
        group_id=group.group_id,
        row_index=group.prompt.row_index,
        epoch=group.prompt.epoch,
        samples=tuple(samples),
        rewards=np.array([r.reward for r in usable], np.float64),
        source_rewards=sources,
        rollout_indices=np.array(slots, np.int32),
        version=group.version,
        ready_at=time.time(),
        references=scores.references,
    )


def _over_tokens(ready: ReadyGroup, advantage: Any) -> ReadyGroup:
    """The group with advantages normalised over its trained tokens, where that is asked for."""
    given = np.array([s.advantage for s in ready.samples], np.float64)
    found = advantage.of_tokens(list(ready.samples), given)
    if found is given:
        return ready
    samples = (dataclasses.replace(s, advantage=float(a)) for s, a in zip(ready.samples, found, strict=True))
    return dataclasses.replace(ready, samples=tuple(samples))


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)

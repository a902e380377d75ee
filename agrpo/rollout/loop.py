"""The producing loop: many groups in flight, each carried from its first request to the trainer by one coroutine.

    admit --> play (G slots below the cap) --> score queue --> score --> advantage --> stitch --> wire

Bounds: a group starts by the token credit of `Admission`, a slot by the cap of `Places`, scoring by the queue of `Judge`.
Released by: the trainer's credit, a finished rollout, a finished scoring. Every wait is watched by `_watch_progress`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo import wire
from agrpo.env.stitch import forwarded_tokens
from agrpo.errors import ContractError, StallError
from agrpo.ledger import Intervals
from agrpo.rollout import report
from agrpo.rollout.admission import Admission
from agrpo.rollout.concurrency import Places
from agrpo.rollout.custom import Custom
from agrpo.rollout.evaluating import Evaluating, Opened
from agrpo.rollout.judge import Dropped, Judge
from agrpo.rollout.play import Slots
from agrpo.rollout.server_watch import ServerWatch
from agrpo.rollout.stall import write_tasks
from agrpo.rollout.tokens import TokenAccount
from agrpo.types import Group, Prompt, Rollout

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Policy:
    """The weight version that the servers are known to serve."""

    version: int


class Loop:
    """Everything one run of the rollout process works with; `run` is its life."""

    def __init__(
        self,
        *,
        settings: Any,  # the `rollout` section
        prompts: Any,
        player: Any,
        client: Any,
        judge: Judge,
        slots: Slots,
        places: Places,
        watch: ServerWatch,
        link: Any,
        policy: Policy,
        evaluations: dict[str, Opened],
        window: Any,
        life: Any,
        custom: Custom | None = None,  # the loop of `rollout.loop`
    ):
        self._settings, self._prompts, self._player, self._client = settings, prompts, player, client
        self._judge, self._slots, self._places, self._watch = judge, slots, places, watch
        self._link, self._policy = link, policy
        self._evaluating = Evaluating(evaluations, slots, judge, self._progress)
        self._window, self._life, self._custom = window, life, custom
        self._tokens = TokenAccount(window)
        self._check_group = getattr(player, "check", None)
        start = link.start
        self._is_fresh = not start.resolved and not start.ready
        self._done = Intervals([*start.resolved, *((g, g + 1) for g in start.ready)])
        self.admission = Admission(settings.group_size, start.limit_tokens, start.taken_tokens, start.pulled_tokens)
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        places.on_change = self._changed.set
        self._num_rows = len(prompts) if hasattr(prompts, "__len__") else None
        self._num_alone, self._num_skipped, self._phase = 0, 0, "starting to generate"
        self._reported_at = self._progress_at = time.monotonic()

    async def run(self) -> None:
        """Produce until the trainer says that the run is over; any other end is an error."""
        self._broken = asyncio.get_running_loop().create_future()
        work = (self._listen(), self._produce(), self._watch.run(), self._report(), self._watch_progress())
        jobs = [asyncio.create_task(job) for job in work]
        try:
            done, _ = await asyncio.wait([*jobs, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        except ConnectionError as error:  # only the wire raises it: the client's are failures of one rollout
            raise wire.WireError("the trainer closed the connection") from error
        finally:
            tasks = [*jobs, *self._tasks, self._broken]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        async for message in self._link.incoming():
            match message:
                case wire.VersionUpdate():
                    self._policy.version = message.version
                    self._watch.synced()
                    self._slots.give_up_stale()
                case wire.Credit():
                    self.admission.credit(
                        message.taken_tokens, message.pulled_tokens, message.limit_tokens, message.gate_closed
                    )
                case wire.AskState():
                    await self._link.send_loop_state(self._custom.state() if self._custom is not None else None)
                case wire.RunEval():
                    self._spawn(self._evaluate(message.names, message.version, message.is_alone))
                case wire.StopEval():
                    self._evaluating.stop()
                case wire.Finish():
                    return
            self._changed.set()

    async def _produce(self) -> None:
        if self._is_fresh:
            await self._evaluate(self._evaluating.due_at_start(), self._policy.version, is_alone=True)
        async for group_id, prompt, prompt_ids in self._admitted():
            places = [self._places.ask() for _ in range(self._settings.group_size)]
            self._spawn(self._carry(group_id, prompt, prompt_ids, places))

    async def _admitted(self) -> AsyncIterator[tuple[int, Prompt, np.ndarray]]:
        """Prompts in the order of group ids, each when its group may start; those that are done already are left out."""
        for group_id in itertools.count():
            if group_id in self._done:
                continue
            prompt = self._prompts.prompt_of(group_id)
            prompt_ids = self._player.render(prompt.messages)
            if len(prompt_ids) >= self._client.max_model_len:
                await self._skip(group_id, prompt, len(prompt_ids))
                continue
            await self._until(lambda: self._places.has_room and not self._num_alone)
            began, is_held = time.monotonic(), not self.admission.may_start()
            await self._until(lambda: self.admission.may_start() and not self._num_alone)
            if is_held:  # a prompt that the gate lets through at once is no wait of 0 s (STA-15)
                self._window.add("rollout/backpressure_s", time.monotonic() - began, 1)
            # Asked at the last moment: what the loop knows of earlier groups is then as new as it can be.
            if self._custom is not None and not self._custom.accepts(prompt, self._num_rows):
                await self._resolve_unplayed(group_id, "filtered")
                continue
            self.admission.start(group_id)
            self._tokens.open(group_id)
            yield group_id, prompt, prompt_ids

    async def _skip(self, group_id: int, prompt: Prompt, num_tokens: int) -> None:
        """A prompt that leaves no room for an answer (GEN-14)."""
        limit = self._client.max_model_len
        text = f"the prompt of row {prompt.row_index} has {num_tokens} tokens, the server's context holds {limit}"
        if self._settings.on_long_prompt == "abort":
            raise ContractError(f"{text}; rollout.on_long_prompt=skip leaves such prompts out")
        if self._num_skipped % 100 == 0:
            _log.warning("skipped: %s (number %d)", text, self._num_skipped + 1)
        self._num_skipped += 1
        await self._resolve_unplayed(group_id, "prompt_too_long")

    async def _resolve_unplayed(self, group_id: int, reason: str) -> None:
        self._window.add("rollout/skipped_prompt_count", 1)
        await self._link.send_resolved(group_id, reason)
        self._progress("skipping prompts")
        await asyncio.sleep(0)  # a data set of nothing else must still let the trainer's messages in

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, looked at after every event; a wait with nothing left to do is a sign of life."""
        while not condition():
            self._changed.clear()
            if self.admission.num_open_groups == 0 and not self._num_alone:
                self._mark("waiting for the trainer")
            # Not wait_for: on Python 3.11 it loses a cancellation that arrives together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._changed.wait()

    async def _carry(
        self, group_id: int, prompt: Prompt, prompt_ids: np.ndarray, places: list[asyncio.Future[None]]
    ) -> None:
        """One group, from its first request to the trainer or to the reason why it is dropped."""
        began = time.time()
        group = await self._play(group_id, prompt, prompt_ids, places)
        played = time.time()
        try:
            ready = await self._judge.ready(group, self._places)
        except Dropped as dropped:
            self.admission.drop(group_id)
            self._tokens.dropped(group_id, dropped.reason)
            await self._send_metrics()
            await self._link.send_resolved(group_id, dropped.reason)
        else:
            self.admission.send(group_id, ready.raw_tokens)
            self._tokens.sent(ready)
            await self._send_metrics()
            await self._link.send_ready(ready)
        self._life.span("group", began, time.time(), group=group_id, played=round(played, 4))
        self._life.done["scored"] += 1
        self._progress("generating")

    async def _play(
        self, group_id: int, prompt: Prompt, prompt_ids: np.ndarray, places: list[asyncio.Future[None]]
    ) -> Group:
        """All slots at once; one that fails neither cancels nor loses the others (AREAL-WF-40)."""
        versions: list[int] = []

        def start() -> int:
            versions.append(self._policy.version)
            return versions[0]

        async def play(slot: int) -> Rollout:
            counted = functools.partial(self._tokens.counted, group_id=group_id, slot=slot)
            rollout = await self._slots.play(prompt, group_id, slot, None, prompt_ids, places[slot], start, counted)
            if rollout.failure is not None:
                self._tokens.failed(group_id, slot, rollout.failure)
            self.admission.finish_rollout(group_id, None if rollout.failure else forwarded_tokens(rollout))
            self._progress("generating")
            return rollout

        rollouts = await asyncio.gather(*(play(slot) for slot in range(len(places))))
        group = Group(group_id, prompt, tuple(rollouts), versions[0], time.monotonic())
        report.record_played(self._window, group, len(places))
        if self._check_group is not None:
            self._check_group(group)
        return group

    async def _evaluate(self, names: list[str], version: int, is_alone: bool) -> None:
        """With nothing to train meanwhile no group starts, so that the answers are soon there."""
        self._num_alone += is_alone
        try:
            await self._evaluating.run(names, version, self._link.send_eval)
        finally:
            self._num_alone -= is_alone
            self._changed.set()

    def _progress(self, phase: str) -> None:
        self._mark(phase)
        self._changed.set()

    def _mark(self, phase: str) -> None:
        self._phase, self._progress_at = phase, time.monotonic()
        self._beat()

    def _beat(self) -> None:
        self._life.done["answers"] = self._client.num_answers
        self._life.beat(
            self._phase,
            in_flight=len(self._slots.in_flight),
            open_groups=self.admission.num_open_groups,
            without_progress_s=round(time.monotonic() - self._progress_at, 1),
        )

    async def _send_metrics(self) -> None:
        now = time.monotonic()
        self._window.add("rollout/generated_tokens_per_s", 0, now - self._reported_at)
        self._reported_at = now
        self._tokens.record()
        await self._link.send_metrics(self._window.to_wire())

    async def _report(self) -> None:
        """Gauges, and metrics while no group finishes; a slow channel only makes the next window larger (ARCH-14)."""
        while True:
            await asyncio.sleep(1.0)
            self._window.add("rollout/score_queue_size", self._judge.num_waiting)
            self._window.add("rollout/concurrency", self._places.cap.num_in_flight)
            self._window.add("rollout/concurrency_cap", self._places.cap.value)
            self._window.add("perf/metrics_dropped_count", 0)
            await self._send_metrics()

    async def _watch_progress(self) -> None:
        """No finished turn, scored group or permitted wait for `rollout.progress_timeout` seconds ends the run (ARCH-8).

        The beat here says that this event loop still turns, which is what `rollout.worker_timeout` asks (ARCH-6): one
        turn may well take longer than that. While no server is up, `server.timeout` limits every request instead.
        """
        limit, num_answers = self._settings.progress_timeout or float("inf"), 0
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            if self._client.is_cut_off:
                self._mark("waiting for the server")
            self._beat()
            if self._client.num_answers != num_answers:  # a rollout of many turns may take longer than the limit
                num_answers = self._client.num_answers
                self._progress_at = time.monotonic()
            silent = time.monotonic() - self._progress_at
            if silent > limit:
                write_tasks(self._life.run_dir)
                raise StallError(
                    f"no rollout, score or sample for {silent:.0f} s (rollout.progress_timeout={limit:g}): "
                    f"{self._slots.oldest_text()}; {self._judge.num_waiting} groups wait for scoring, "
                    f"{self._judge.num_scoring} are being scored; {self._client.last_answer_text()}"
                )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._broken.done():
            self._broken.set_exception(task.exception())

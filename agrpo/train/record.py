"""From the steps of a logging window to one record for every sink."""

from __future__ import annotations

import time
from typing import Any

from agrpo.config import Config
from agrpo.metrics.diagnose import verdicts
from agrpo.metrics.window import Window
from agrpo.train.loop import Trainer
from agrpo.train.meter import open_meter
from agrpo.train.state import Progress
from agrpo.types import Step


class Recorder:
    """Step times and records of one rank (LOG-1); `feeder` and `sinks` are rank 0's, None and empty elsewhere."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        progress: Progress,
        feeder: Any,
        sinks: list[Any],
        num_rows: int | None,
        callbacks: Any,
    ):
        self._config, self._trainer, self._progress = config, trainer, progress
        self._feeder, self._sinks, self._num_rows = feeder, sinks, num_rows
        ranks = trainer.ranks
        self._meter = open_meter(config.model, trainer.model, ranks.device, ranks.world_size)
        self._callbacks = callbacks
        self._num_steps = 0  # since the last record
        self._counted = self._written = progress.step
        self._step_ended_at = time.perf_counter()

    def took(self, step: Step) -> None:
        """Rank 0 hands out `step`."""
        self._progress.num_tokens += sum(r.num_tokens for m in step.microbatches for r in m.rows)
        self._meter.add(step)

    def step(self, step_index: int) -> None:
        """After each step; writes where a window ends."""
        self._count(step_index)
        logger = self._config.logger
        if step_index % logger.logging_steps == 0 or (logger.logging_first_step and step_index == 1):
            self._write_steps(step_index)
            self._trainer.parity.judge(step_index)

    def end(self) -> None:
        """Write the steps of a window that did not fill up, also a trained one whose sync failed."""
        if self._progress.step > self._counted:
            self._count(self._progress.step)
        if self._num_steps:
            self._write_steps(self._progress.step)

    def _count(self, step_index: int) -> None:
        now = time.perf_counter()
        self._trainer.window.add("perf/step_s", now - self._step_ended_at)
        self._step_ended_at = now
        self._num_steps += 1
        self._counted = step_index

    def write(self, window: Window, step_index: int, verdict: dict[str, str]) -> None:
        """A record of `window` for every sink; each evaluation that another of its name followed has one of its own before."""
        for evaluated_at, earlier in self._feeder.evaluations.take_earlier():
            # Services take no step that lies before one they have.
            self._hand_out(earlier, min(max(evaluated_at, self._written), step_index), {})
        self._hand_out(window, step_index, verdict)

    def _hand_out(self, window: Window, step_index: int, verdict: dict[str, str]) -> None:
        self._written = step_index
        record = {**window.record(step_index), **verdict}
        for sink in self._sinks:
            sink.write(step_index, record)
        self._callbacks.logged(step_index, record)

    def _write_steps(self, step_index: int) -> None:
        trainer, steps = self._trainer, self._num_steps
        forward_s, total_s = trainer.forward_timer.take_s(), trainer.timer.take_s()
        trainer.figures.record(trainer.window, steps)
        trainer.parity.record(trainer.window)
        self._num_steps = 0
        window = trainer.window
        if self._feeder is None:
            window.record(step_index)
            return
        window.merge(self._feeder.take_window())
        unique, step_s = window.total("batch/forwarded_tokens_per_step"), window.total("perf/step_s")
        window.add("perf/fwd_s", forward_s, steps)
        window.add("perf/fwd_bwd_s", total_s, steps)
        window.add("perf/fwd_bwd_forwarded_tokens_per_s", unique, total_s)
        window.add("perf/wall_clock_forwarded_tokens_per_s", unique, step_s)
        window.add("perf/wall_clock_trained_tokens_per_s", window.total("batch/trained_tokens_per_step"), step_s)
        self._meter.record(window, total_s, step_s)
        window.add("rollout/backpressure_s_per_step", window.total("rollout/backpressure_s"), steps)
        window.add("num_tokens", self._progress.num_tokens)
        if self._num_rows:
            window.add("epoch", self._feeder.num_resolved / self._num_rows)
        self.write(window, step_index, verdicts(window, steps, self._config.rollout.max_concurrent_rollouts))

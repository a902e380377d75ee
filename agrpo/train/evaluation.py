"""Evaluations as the trainer sees them: when they are asked for, and that no weights change under one that runs.

While an evaluation generates, a sync that is due is left out: training goes on, and so does generation, with the version
that the servers have; for staleness a version counts as one, however many steps it served. After `max_held_syncs` of them
in a row the evaluation is given up and the weights go out. With `rollout.max_staleness=0` training waits for it instead,
since no step may use what older weights sampled. Versions that are adapters stand side by side: nothing is left out until
the evaluation's own would be unloaded.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agrpo import wire
from agrpo.errors import AgrpoError, StallError
from agrpo.metrics.sinks import finite, keep_lines
from agrpo.metrics.window import Window
from agrpo.train.ranks import END, IDLE, RESEND, Ranks, Work

SEND, HOLD, WAIT = 0, 1, 2  # what becomes of a sync that is due
LOOK_S = 0.25  # between two looks at what is awaited
FILE_NAME = "evaluations.jsonl"
_log = logging.getLogger(__name__)


class EvaluationRecord:
    """Rank 0: which evaluations run, with which weights, and what they came to. Called from two threads."""

    def __init__(self, send: Callable[[Any], None]):
        self._send, self._lock = send, threading.Lock()
        self._running: dict[str, tuple[int, int]] = {}  # name -> version, step
        self._stopped: set[str] = set()  # running, but no longer generating
        self._void: set[str] = set()  # running, and some answer may be of other weights than its label says
        self._earlier: list[tuple[int, Window]] = []  # step and figures of those that another of their name followed
        self.path: Path | None = None  # where each result is appended

    @property
    def running(self) -> dict[str, int]:
        """Name -> version of those that were asked for and have not ended."""
        with self._lock:
            return {name: version for name, (version, _) in self._running.items()}

    @property
    def generating(self) -> dict[str, int]:
        """Of `running`, those that need the weights to stay as they are."""
        with self._lock:
            return {name: version for name, (version, _) in self._running.items() if name not in self._stopped}

    def ask(self, names: list[str], version: int, step: int, is_alone: bool = False) -> None:
        """Have these run with the weights of `step`, which the servers have as `version`."""
        with self._lock:
            self._running |= dict.fromkeys(names, (version, step))
        self._send(wire.RunEval(version, names, is_alone))

    def stop(self) -> None:
        """Other weights go out: what still generates ends without a result."""
        with self._lock:
            self._stopped |= set(self._running)
        self._send(wire.StopEval())

    def void(self) -> None:
        """Other weights go out under the same label: nothing that runs has a result."""
        with self._lock:
            self._void |= set(self._running)
        self.stop()

    def receive(self, message: wire.EvalResult, record: Callable[[dict[str, float]], None]) -> None:
        """`record` the figures; only then has the evaluation ended, for whoever waits for the last one writes what is there."""
        record(self._figures(message))
        with self._lock:
            self._running.pop(message.name, None)
            self._void.discard(message.name)
            self._stopped.discard(message.name)

    def _figures(self, message: wire.EvalResult) -> dict[str, float]:
        with self._lock:
            # A fresh run's first ones, which the rollout process begins by itself, are of step 0.
            version, step = self._running.get(message.name, (0, 0))
            is_void = message.name in self._void
        if is_void or not message.result:
            _log.warning("evaluation %s of step %d (version %d) has no result: the weights changed", message.name, step, version)
            return {"given_up_count": 1}
        result = {**message.result, "step": step}
        self._append({"name": message.name, **result})
        return result

    def add(self, window: Window, name: str, figures: dict[str, float]) -> None:
        """The figures of one, which has a window to itself if this one holds another of that name: it keeps the last only."""
        before = window.get(f"eval/{name}/step")
        with self._lock:
            if before is not None and "step" in figures:
                self._earlier.append((int(before), window.take(f"eval/{name}/")))
        for key, value in figures.items():
            window.add(f"eval/{name}/{key}", value)

    def take_earlier(self) -> list[tuple[int, Window]]:
        """Step and figures of those since the last call that the window of all metrics has no longer."""
        with self._lock:
            earlier, self._earlier = self._earlier, []
        return earlier

    def open(self, path: Path, step: int) -> None:
        """Results are appended to `path`, which loses those of later steps than the one that is resumed; of a fresh start all."""
        self.path = path
        try:
            keep_lines(path, lambda line: 0 < step >= line.get("step", 0))
        except OSError as error:
            _log.warning("%s still holds results of the steps after %d: %s", path, step, error)

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(finite(line)) + "\n")
        except OSError as error:
            _log.warning("%s was not written: %s", self.path, error)


@dataclass(slots=True)
class Evaluations:
    """One rank's part; `feeder` is rank 0's, None elsewhere. Methods that all ranks call together say so."""

    evaluations: dict[str, Any]
    ranks: Ranks
    trainer: Any
    feeder: Any
    max_staleness: int
    timeout_s: float  # without any message of the rollout process, at the end
    beat: Callable[..., None]
    is_asked_to_stop: Callable[[], bool]
    _due: set[str] = field(default_factory=set)
    _num_held: int = 0  # syncs in a row
    _heard_at: float = 0.0
    _last: list[str] = field(default_factory=list)  # to be asked for once the rollout process is connected
    _step: int = 0

    def ask_due(self, step: int, is_last: bool) -> None:
        """Rank 0, after each step: begin what is due, as soon as the servers have weights of a step.

        At the last step those that run at the end anyway are left to that.
        """
        self._due |= {name for name, e in self.evaluations.items() if e.every and step % e.every == 0}
        if is_last:  # also what is overdue, because one of that name was running
            self._due -= {name for name, e in self.evaluations.items() if e.at_end}
        if not self._due or not self.trainer.is_synced or not self.feeder.is_connected:
            return
        names = [name for name in self.evaluations if name in self._due - set(self._record.running)]
        if names:
            self._due -= set(names)
            self._record.ask(names, self.trainer.version, step)

    def lets_sync(self) -> bool:
        """Whether a sync that is due is to be sent now; may wait. All ranks."""
        if not any(e.every for e in self.evaluations.values()):
            return True
        while (verdict := self.ranks.tell(self._verdict() if self.ranks.is_first else WAIT)) == WAIT:
            self.beat("waiting for the evaluation (rollout.max_staleness=0)")
            time.sleep(LOOK_S)
        if verdict == HOLD and self.ranks.is_first:
            self.feeder.held()
        self._num_held = self._num_held + 1 if verdict == HOLD else 0
        return verdict == SEND

    def _verdict(self) -> int:
        running = self._record.generating
        if not running or self._keeps(min(running.values())):
            return SEND
        if self.is_asked_to_stop():
            self._record.void()
            return SEND
        if self.max_staleness == 0:
            return SEND if self._is_cut_off() else WAIT
        if self._num_held < min(self.evaluations[name].max_held_syncs for name in running):
            return HOLD
        self._record.stop()
        return SEND

    def _keeps(self, version: int) -> bool:
        """Whether the servers still have `version` after the next sync."""
        return bool(self.trainer.sender.prefix) and self.trainer.version + 1 - version <= self.max_staleness

    def _is_cut_off(self) -> bool:
        """No answer can come any more until weights are sent, or at all."""
        try:
            self.feeder.await_rollout(0)
        except (AgrpoError, OSError):
            return True  # raised again where the next step is asked for
        if self.trainer.outage.is_over():
            self._record.void()
            return True
        return False

    def resend(self) -> None:
        """The weights again, to a server that was started again. All ranks."""
        if self.ranks.is_first and not self.trainer.is_synced:
            self._record.void()  # these weights are newer than their label
        self.trainer.resend_weights()

    def finish(self, names: list[str], step: int) -> None:
        """Have `names` run with the servers' weights, those of `step`, and wait until none runs. All ranks.

        A server that is started again meanwhile gets the weights. StallError once the rollout process, which watches its
        own progress, has sent nothing for `timeout_s` seconds. A signal ends the wait: everything else is saved by now.
        """
        self._heard_at, self._last, self._step = time.monotonic(), list(names), step
        while (kind := self.ranks.share(self._works() if self.ranks.is_first else None).kind) != "end":
            self.beat("evaluating")
            if kind == "resend":
                self.resend()

    def _works(self) -> list[Work]:
        if self.is_asked_to_stop():
            self._record.void()
            return [END] * self.ranks.world_size
        # A run that was complete when it was resumed comes here before the rollout process is there.
        if self.feeder.await_rollout(LOOK_S) and self._last:
            self._record.ask(self._last, self.trainer.version, self._step, is_alone=True)
            self._last = []
        missing = [*self._last, *self._record.running]
        if not missing:
            return [END] * self.ranks.world_size
        self._raise_if_silent(missing)
        time.sleep(LOOK_S)
        return [RESEND if self.trainer.outage.is_over() else IDLE] * self.ranks.world_size

    def _raise_if_silent(self, names: list[str]) -> None:
        if time.monotonic() > max(self._heard_at, self.feeder.heard_at) + self.timeout_s:
            raise StallError(
                f"the rollout process sent nothing for {self.timeout_s:.0f} s during the final evaluation of "
                f"{', '.join(names)}; the trained model is exported already"
            )

    @property
    def _record(self) -> EvaluationRecord:
        return self.feeder.evaluations

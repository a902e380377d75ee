"""Rank 0's feed: samples from the wire, staleness, admission credit, and steps planned one ahead by a thread.

    wire thread --(inbox)--> planning thread --(one step ahead)--> training loop
                    |                |                                   |
                 ledger.ready     stale, oversize dropped          ledger.trained

Staleness is judged against the version at which the step will be trained, which is known when it is planned: the
version grows by one with each sync, and syncs happen after fixed steps. So a step planned ahead holds no sample that is
too old when it starts (STA-3, STA-17), and samples carried over to the next step are looked at again.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from agrpo import wire
from agrpo.ledger import AdmissionCredit, Ledger
from agrpo.metrics.balance import TokenBalance
from agrpo.metrics.window import Window
from agrpo.train.account import Account
from agrpo.train.evaluation import EvaluationRecord
from agrpo.train.measure import add_queue, step_window
from agrpo.train.untrained import Untrained
from agrpo.types import ReadyGroup, Sample, Step

FeederState = tuple[dict[str, Any], bytes, bytes | None]  # ledger; ready groups as frames; state of the user's loop
LOOP_STATE_S = 30.0
SWITCH_S = 0.0005  # instead of 5 ms, which a step would meet several times
CAP = "rollout/concurrency_cap"  # the metric that says where the controller stands
_log = logging.getLogger(__name__)


class Feeder:
    """Owns the ledger, the credit and the planner; the training loop calls `next_step`, `trained` and `synced`."""

    def __init__(
        self,
        *,
        planner: Any,
        ledger: Ledger,
        credit: AdmissionCredit,
        settings: Any,  # the `rollout` section
        version_at: Callable[[int], int],  # step index -> weight version it is trained at, where no sync is left out
        version: int,  # that the server holds now
        step: int,  # steps done
        advantage: Any = None,  # the component, where it needs whole steps
        adapters: str = "",  # what names of adapters begin with, where versions are adapters
        asks_loop: bool = False,  # the rollout process runs a loop of the user's own, which may keep a state
        loop_state: bytes | None = None,  # that state, of the checkpoint that is resumed
        concurrency_cap: int | None = None,  # of that checkpoint
    ):
        self._planner, self.ledger, self._account, self._settings = planner, ledger, Account(credit), settings
        self._planned_version_at, self._version, self._step = version_at, version, step
        self._adapters = adapters
        self._lock = threading.RLock()
        self._window = Window()
        self._asks_loop, self._loop_state = asks_loop, loop_state
        self._concurrency_cap = concurrency_cap
        self._snapshot: FeederState | None = None
        self._untrained = Untrained()
        if getattr(advantage, "needs_step", False):
            planner.advantages = lambda samples: advantage.of_step(samples, self._untrained.group)
        self._inbox: queue.SimpleQueue[ReadyGroup] = queue.SimpleQueue()
        self._planned: queue.Queue[tuple[Step, list[Sample], Window]] = queue.Queue(maxsize=1)
        self._in_step: list[Sample] = []
        self._has_ended = False
        self.evaluations = EvaluationRecord(self._send)
        self._num_held = 0  # syncs left out for an evaluation
        self.balance = TokenBalance()
        self.heard_at = 0.0  # time.monotonic() of the rollout process's last message
        self._error: BaseException | None = None
        self._listener: wire.Listener | None = None

    def open(self, host: str, port: int, key: str, ready: list[ReadyGroup]) -> None:
        """Start planning from `ready` (saved with a checkpoint) and listen for the rollout process."""
        self._account.restored_tokens = sum(group.raw_tokens for group in ready)
        for group in ready:
            self.balance.restored(group.num_trained_tokens)
            self._accept(group)
        # While the threads here work, the training loop waits for the interpreter at most so long, each time.
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=self._plan, name="planner", daemon=True).start()
        self._listener = wire.Listener(host, port, key, self._start_state, self._receive)

    @property
    def port(self) -> int:
        return self._listener.port

    def next_step(self, timeout_s: float) -> Step | None:
        """The next planned step, or None if none was ready in time. Raises what a thread raised."""
        self._check()
        try:
            step, samples, window = self._planned.get(timeout=timeout_s)
        except queue.Empty:
            self._check()
            self._publish()  # whatever was missed before the rollout process connected
            return None
        raw = sum(len(s.token_ids) for s in samples)
        with self._lock:
            self._account.credit.taken(raw)
            self._account.credit.step_used(raw)
            self._in_step = samples
            self._window.merge(window)
            add_queue(self._window, samples, self._untrained)
            # Closed until the sync after this step; without one nothing would open it again (STA-14).
            is_sync_next = self._version_at(step.index + 1) > self._version_at(step.index)
            self._account.gate_closed = self._settings.max_staleness == 0 and is_sync_next
        self._publish()
        return step

    def trained(self, step: Step) -> None:
        """The optimizer has used the step: its groups are resolved (RUN-3)."""
        counts: dict[int, int] = {}
        with self._lock:
            num_tokens = sum(sample.num_trained_tokens for sample in self._in_step)
            self.balance.trained(num_tokens)
            self._window.add("tokens/trained", num_tokens)
            for sample in self._in_step:
                counts[sample.group_id] = counts.get(sample.group_id, 0) + 1
                self._untrained.forget(sample)
            for group_id, count in counts.items():
                self.ledger.trained(group_id, count, step.index)
            self._step, self._in_step = step.index, []

    def synced(self, version: int) -> None:
        """The server serves `version`."""
        with self._lock:
            self._version, self._account.gate_closed = version, False
        self._send(wire.VersionUpdate(version))
        self._publish()

    def held(self) -> None:
        """A sync that was due is left out: every later version is one lower than planned, and no sample gets older."""
        with self._lock:
            self._num_held += 1
            self._account.gate_closed = False
            self._window.add("perf/held_sync_count", 1)
        self._publish()

    @property
    def has_samples(self) -> bool:
        """Whether any sample waits to be trained."""
        with self._lock:
            return bool(self._untrained)

    @property
    def num_resolved(self) -> int:
        with self._lock:
            return len(self.ledger.resolved)

    def take_window(self) -> Window:
        """Everything measured since the last call, rollout process included."""
        with self._lock:
            self._window.add("tokens/untrained", self._untrained.num_tokens)
            window, self._window = self._window, Window()
        return window

    def token_totals(self) -> dict[str, Any]:
        """What became of every generated token, for the summary."""
        with self._lock:
            return self.balance.totals(self._untrained.num_tokens)

    def state(self) -> FeederState:
        """What a checkpoint keeps (RES-2, RES-4): as it was when the user's loop gave its state, where there is one."""
        if self._asks_loop and self._listener is not None and self._listener.connected.is_set():
            self._snapshot, deadline = None, time.monotonic() + LOOP_STATE_S
            self._send(wire.AskState())
            while self._snapshot is None and self._listener.error is None and time.monotonic() < deadline:
                time.sleep(0.005)
            if self._snapshot is not None:
                return self._snapshot
            _log.warning("rollout.loop gave no state in %.0f s; the checkpoint keeps the one before", LOOP_STATE_S)
        with self._lock:
            return self._state()

    def _state(self) -> FeederState:
        ledger = {
            **self.ledger.state(),
            "step_tokens": self._account.credit.step_tokens,
            "concurrency_cap": self._concurrency_cap,
        }
        return ledger, self._untrained.frames(), self._loop_state

    def end(self) -> None:
        """No step follows: what arrives or goes stale from now on changes nothing, so that the ledger ends with what the
        last checkpoint says (GEN-21)."""
        with self._lock:
            self._has_ended = True

    def await_rollout(self, timeout_s: float) -> bool:
        """Whether the rollout process has connected; before that no message can reach it."""
        self._check()
        return self._listener.connected.wait(timeout_s)

    @property
    def is_connected(self) -> bool:
        """Whether the rollout process has connected; what is sent before that reaches nobody."""
        return self._listener is not None and self._listener.connected.is_set()

    def close(self) -> None:
        """Tell the rollout process that the run is over."""
        self._send(wire.Finish())
        if self._listener is not None:
            self._listener.close()
        self.ledger.close()

    def _check(self) -> None:
        error = self._error or (self._listener.error if self._listener is not None else None)
        if error is not None:
            raise error

    def _start_state(self) -> wire.Start:
        with self._lock:
            credit = self._account.message(self._planner.open_tokens)
            return wire.Start(
                step=self._step,
                version=self._version,
                resolved=self.ledger.resolved.to_list(),
                ready=self._untrained.group_ids,
                taken_tokens=credit.taken_tokens,
                pulled_tokens=credit.pulled_tokens,
                limit_tokens=credit.limit_tokens,
                adapters=self._adapters,
                loop_state=self._loop_state,
                concurrency_cap=self._concurrency_cap,
            )

    def _receive(self, message: Any) -> None:
        self.heard_at = time.monotonic()
        if isinstance(message, ReadyGroup | wire.Resolved):
            with self._lock:  # one hold: a checkpoint in between would keep a line of the ledger without its samples
                if not self._has_ended:
                    self._record(message)
        elif isinstance(message, wire.Metrics):
            with self._lock:
                self._window.merge(message.window)
                self.balance.reported(message.window)
                if CAP in message.window:
                    value, weight = message.window[CAP]
                    self._concurrency_cap = round(value / weight)
        elif isinstance(message, wire.EvalResult):
            self.evaluations.receive(message, lambda figures: self._evaluated(message.name, figures))
        elif isinstance(message, wire.LoopState):
            with self._lock:  # all that was sent before it is recorded, nothing after it
                self._loop_state = message.state
                self._snapshot = self._state()

    def _evaluated(self, name: str, figures: dict[str, float]) -> None:
        with self._lock:
            self.evaluations.add(self._window, name, figures)

    def _record(self, message: ReadyGroup | wire.Resolved) -> None:
        if isinstance(message, wire.Resolved):
            self.ledger.dropped(message.group_id, message.reason)
            return
        self.ledger.ready(message.group_id, len(message.samples))
        self.balance.received(message.num_trained_tokens)
        self._accept(message)

    def _accept(self, group: ReadyGroup) -> None:
        with self._lock:
            self._untrained.add(group)
        self._inbox.put(group)

    def _plan(self) -> None:
        try:
            while True:
                group = self._inbox.get()
                for sample in group.samples:
                    self._place(sample)
                with self._lock:
                    self._account.credit.pulled(group.raw_tokens)
                if self._inbox.empty():
                    self._publish()
        except BaseException as error:  # raised again by the training loop, which looks before every wait
            self._error = error

    def _place(self, sample: Sample) -> None:
        if self._is_stale(sample):
            self._drop(sample, "stale")
            return
        step = self._planner.add(sample)
        self._drop_oversize()
        while step is not None:
            self._emit(step)
            for stale in self._planner.drop(self._is_stale):
                self._drop(stale, "stale")
            step = self._planner.ready()

    def _is_stale(self, sample: Sample) -> bool:
        return self._staleness(sample, self._planner.next_index) > self._settings.max_staleness

    def _version_at(self, step_index: int) -> int:
        """What a step is trained at, if no further sync is left out; never less than it will be."""
        return self._planned_version_at(step_index) - self._num_held

    def _staleness(self, sample: Sample, step_index: int) -> int:
        by_group = self._settings.staleness_stamp == "group"
        version = self._untrained.group(sample.group_id).version if by_group else sample.oldest_version
        return self._version_at(step_index) - version

    def _drop_oversize(self) -> None:
        for sample in self._planner.dropped_oversize:
            self._drop(sample, "oversize")
        self._planner.dropped_oversize.clear()

    def _drop(self, sample: Sample, reason: str) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._account.credit.taken(len(sample.token_ids))
            self._untrained.forget(sample)
            self.ledger.dropped(sample.group_id, reason, 1)
            name = {"stale": "sample/dropped_stale_count", "oversize": "batch/dropped_oversize_count"}[reason]
            self._window.add(name, 1)
            self.balance.discarded(reason, sample.num_trained_tokens)
            self._window.add(f"tokens/discarded/{reason}", sample.num_trained_tokens)

    def _emit(self, step: Step) -> None:
        samples = self._planner.step_samples
        with self._lock:
            unique = sum(r.num_tokens for m in step.microbatches for r in m.rows)
            self._account.planned(sum(len(s.token_ids) for s in samples), unique)
            groups = {s.group_id: self._untrained.group(s.group_id) for s in samples}
            ages = [self._staleness(s, step.index) for s in samples]
            window = step_window(samples, groups, ages, self._planner.statistics(step))
        self._planned.put((step, samples, window))

    def _publish(self) -> None:
        with self._lock:
            self._send(self._account.message(self._planner.open_tokens))

    def _send(self, message: Any) -> None:
        if self._listener is not None:
            self._listener.send(message)

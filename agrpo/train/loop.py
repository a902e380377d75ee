"""The training loop: one step of work is a forward and backward per microbatch, an update, and a sync where due."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from agrpo.errors import AgrpoError, ServerError
from agrpo.metrics.window import Window
from agrpo.model.moe import balance_of
from agrpo.model.optim import Updater
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.train.figures import LossFigures
from agrpo.train.parity import ParityProbe
from agrpo.train.proof import prove
from agrpo.train.proximal import NotNeeded
from agrpo.train.ranks import Ranks, Work
from agrpo.train.trace import NoTrace

SKIPPED_LIMIT = 10  # float16 loss scaling skips a few steps in a row while it finds its scale
_log = logging.getLogger(__name__)


class DeviceTimer:
    """Seconds that the device spends between `start` and `stop`, summed; read without stopping the device (LOG-10)."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def take_s(self) -> float:
        """Sum since the last call; waits for the device."""
        spans, self._spans = self._spans, []
        if not self._is_cuda:
            return sum(end - began for began, end in spans)
        torch.cuda.synchronize()
        return sum(began.elapsed_time(end) for began, end in spans) / 1000


@dataclass(slots=True)
class Trainer:
    """One rank's half of the work; every method is called on all ranks together."""

    ranks: Ranks
    model: torch.nn.Module
    updater: Updater
    loss: Any
    sender: Any  # this rank's: what is sent, how, and under which name
    proof: Any
    outage: Any  # of the servers, as this rank takes part in it
    parity: ParityProbe
    temperature: float
    version: int  # weight version the server holds
    every_steps: int  # optimizer steps between two syncs
    is_synced: bool = False  # the server holds exactly these weights
    proximal: Any = field(default_factory=NotNeeded)  # log-probs at the start of a step
    trace: Any = field(default_factory=NoTrace)  # keeps the log-probs of what was trained
    num_skipped: int = 0  # updates in a row that were not applied
    window: Window = field(default_factory=Window)
    figures: LossFigures = field(init=False)
    forward_timer: DeviceTimer = field(init=False)
    timer: DeviceTimer = field(init=False)

    def __post_init__(self):
        device = self.ranks.device
        self.figures, self.forward_timer, self.timer = LossFigures(device), DeviceTimer(device), DeviceTimer(device)

    def step(self, work: Work) -> None:
        """Gradients of every microbatch, each sample with its exact share of the loss, then an update; mostly one."""
        self.timer.start()
        proximal = self.proximal.of(self.model, work.rows, work.num_updates, self.ranks.device)
        optimizer_s = 0.0
        for number, (row, shares, before) in enumerate(zip(work.rows, work.shares, proximal, strict=True), 1):
            self._accumulate(work, row, shares, before)
            if number % work.microbatches_per_update == 0:
                self.timer.stop()
                optimizer_s += self._update(work.index)
                self.timer.start()
        self.timer.stop()
        self.trace.write(work.index)
        self.window.add("perf/optimizer_s", optimizer_s)

    def _accumulate(self, work: Work, row: Any, shares: Any, proximal: Any) -> None:
        """Forward and backward of one of an update's microbatches; nothing here waits for the device."""
        self.forward_timer.start()
        on_device = DeviceRow.of(row, self.ranks.device)
        terms = dataclasses.replace(
            token_terms(self.model, on_device, self.temperature, self.loss.wants_head),
            version=self.version + (not self.is_synced),
            proximal_logprobs=proximal,
        )
        share = torch.from_numpy(shares).to(self.ranks.device, non_blocking=True)
        value = (self.loss(terms) * share[terms.sample_index]).sum() + self._balance(terms, work.microbatches_per_update)
        self.forward_timer.stop()
        self.updater.backward(value)
        self.figures.add(self.loss, terms, value / work.num_updates)
        self.trace.add(row, terms)
        self.parity.add(terms, self.version if self.is_synced else None)

    def _update(self, step_index: int) -> float:
        """One optimizer update; returns its seconds."""
        began = time.perf_counter()
        update = self.updater.step()
        self.is_synced = False
        self._check(update, step_index)
        self.window.add("grad_norm", update.grad_norm)
        self.window.add("learning_rate", update.learning_rate)
        return time.perf_counter() - began

    def _balance(self, terms: Any, num_microbatches: int) -> torch.Tensor | float:
        """The row's share of the auxiliary loss, so that gradients summed over an update's rows are of its mean (LOSS-21)."""
        if terms.aux_loss is None:
            return 0.0
        return balance_of(self.model).coefficient / (num_microbatches * self.ranks.world_size) * terms.aux_loss

    def _check(self, update: Any, step_index: int) -> None:
        """An update that could not be applied is said; several in a row end the run, whose weights no longer change."""
        self.num_skipped = 0 if update.is_applied else self.num_skipped + 1
        if not update.is_applied:
            _log.warning("step %d: the gradient norm is not finite, the weights stay as they were", step_index)
        if self.num_skipped >= SKIPPED_LIMIT:
            raise AgrpoError(
                f"the gradient norm was not finite in {self.num_skipped} steps in a row, the last one step {step_index}: "
                "lower optimizer.learning_rate, or set model.precision=no to rule out the precision"
            )

    def send_weights(self, version: int) -> None:
        """Make the server equal to the model under `version`, and prove it where that is due (SYNC-3, SYNC-16).

        A server that dies meanwhile and is started again is no failure: it gets all weights, and their arrival is proven.
        """
        num_restarts = self.outage.num_restarts
        while True:
            if self.outage.claim():
                self.sender.session.reset()
            try:
                times = self.sender.session.send(self.sender.weights(), version, self.ranks.barrier)
                gap = self._proven(version) if self.sender.session.needs_proof else None
                break
            except ServerError as failure:
                self.outage.wait_out(failure)
        self.version, self.is_synced = version, True
        self.window.add("perf/weight_sync_s", times.total_s)
        self.window.add("perf/weight_sync_pause_s", times.pause_s)
        self.window.add("perf/weight_sync_barrier_s", times.barrier_s)
        self.window.add("perf/weight_sync_transfer_s", times.transfer_s)
        self.window.add("perf/weight_sync_version", version)
        if gap is not None:
            self.window.add("perf/weight_sync_parity", gap)
        if self.outage.num_restarts > num_restarts:
            self.window.add("server/restart_count", self.outage.num_restarts - num_restarts)

    def _proven(self, version: int) -> float:
        return prove(self.proof, self.model, version, self.ranks.device, self.sender.name_of(version))

    def resend_weights(self) -> None:
        """The weights again, to a server that was started again, under the version that is known everywhere.

        Where steps have been taken since that version was sent, its label says less than the weights are: a sample then
        counts as older than it is, never as younger.
        """
        is_synced = self.is_synced
        self.send_weights(self.version)
        self.is_synced = is_synced

    def is_sync_due(self, step_index: int) -> bool:
        return step_index % self.every_steps == 0

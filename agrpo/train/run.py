"""One rank's run from the loaded model to the exported one. Rank 0 feeds, records, saves and talks to the server."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from pathlib import Path
from typing import Any

from agrpo.config import Config
from agrpo.config.checkpoint_folder import resumed, set_aside
from agrpo.data.prompts import order_of
from agrpo.data.rows import gives_prompts
from agrpo.errors import AgrpoError, ContractError, ServerError, StallError
from agrpo.ledger import EPOCH_OF_A_STREAM, Intervals, Ledger, in_words
from agrpo.lifecycle import Life, Runtime, tell_exported, tell_wire_port, without_collector
from agrpo.metrics.sinks import open_sinks
from agrpo.metrics.summary import write_summary
from agrpo.model import checkpoint as checkpoints
from agrpo.model.optim import Updater
from agrpo.model.rope import fix_rope
from agrpo.model.spread import open_model
from agrpo.model.tokenizer import load_tokenizer
from agrpo.sync.control import ServerControl
from agrpo.sync.session import of_rank_0
from agrpo.train import evaluation, opening
from agrpo.train.callbacks import open_callbacks
from agrpo.train.facts import probe_ids, seed_all, served_model
from agrpo.train.feeder import Feeder
from agrpo.train.outage import Outage
from agrpo.train.pushes import Pushes
from agrpo.train.ranks import END, IDLE, RESEND, Ranks, divide
from agrpo.train.record import Recorder
from agrpo.train.shares import Sharing
from agrpo.train.state import Progress, restore, save

_IDLE_S = 1.0  # how often rank 0 looks up while it waits for samples
_LOOK_S = 0.25  # how often while it waits for the rollout process to connect
_CONNECT_S = 30.0  # for the rollout process to connect before it is told that the run is over
CALLBACK_STOP, SIGNAL_STOP = "stopped by a callback", "stopped by a signal"
_log = logging.getLogger(__name__)


class TrainRun:
    """Everything one rank works with; `open`, `train`, `finish`, `close` in this order."""

    def __init__(self, config: Config, run_dir: Path, life: Life):
        self.config, self.run_dir, self.life = config, run_dir, life
        self.runtime = Runtime.load(run_dir)
        self.stop_requested = False
        self.exit_reason = "finished"
        self.failure: Exception | None = None  # of the feed
        self.feeder: Feeder | None = None
        self.sinks: list[Any] = []
        self.progress = Progress()
        self._epoch = 0  # complete passes at the last look
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        signal.signal(signal.SIGINT, self._ask_to_stop)

    def _ask_to_stop(self, signum: int, frame: Any) -> None:
        """The running step is finished and saved (CLI-13). Whoever stops a job may tell every process of it, and the supervisor
        tells the ranks too, so a signal that comes again says nothing new; to end at once, the supervisor kills."""
        self.stop_requested = True

    def open(self) -> None:
        config = self.config
        self.ranks = Ranks(config.run.use_cpu, config.run.collective_timeout)
        self.pushes = Pushes(config, self.run_dir, self.ranks, self.life.beat, lambda: self.stop_requested)
        seed_all(config.run.seed, config.run.full_determinism)
        self.life.beat("loading the model")
        with without_collector():
            self.model, self.tokenizer = open_model(config.model, self.ranks.device), load_tokenizer(config.model)
        scaled = config.model.precision == "fp16"
        self.sharing = Sharing.of(config.loss, config.sampler.max_completion_length)
        num_updates = config.run.max_steps and config.run.max_steps * self.sharing.num_updates
        self.updater = Updater(self.model, config.optimizer, num_updates, scaled)
        rows = config.data.open(needs_prompt=not gives_prompts(config)) if self.ranks.is_first else None
        self.num_rows = len(rows) if hasattr(rows, "__len__") else None
        self.fingerprint, self.order = getattr(rows, "fingerprint", None), order_of(rows, config.data, config.run.seed)
        # Another node may not see yet what this one sees.
        start = resumed(config.run.resume, self.run_dir) if self.ranks.is_first else None
        self.resumed_from = of_rank_0(start, self.ranks.world_size)
        if self.resumed_from is not None:
            self.life.beat("restoring the checkpoint")
            self.progress = restore(self.resumed_from, self.model, self.updater, config.run, self.fingerprint, self.order)
            self._epoch = self.ranks.tell(self._epochs_of(self.progress.ledger))
        if self.ranks.is_first:
            for path in set_aside(self.run_dir / "checkpoints", self.progress.step, self.resumed_from):
                _log.warning("%s is of another course of this run; it may be deleted", path)
        self._open_sync()
        if self.ranks.is_first:
            self._open_feed()
        self._open_evaluations()

    def _epochs_of(self, ledger: dict[str, Any] | None) -> int:
        """Complete passes in a checkpoint's ledger; rank 0 alone knows the data."""
        if ledger is None or not self.num_rows:
            return 0
        return len(Intervals(map(tuple, ledger["resolved"]))) // self.num_rows

    def _open_sync(self) -> None:
        """The first sync makes the server equal to the trainer before any prompt is sent (SYNC-2, RES-13)."""
        config, ranks = self.config, self.ranks
        server = ServerControl(self.runtime.server_urls, config.server.timeout)
        outage = Outage(server, ranks, self.life.beat, lambda: self.stop_requested)
        outage.await_up()
        self.served = served_model(server) if ranks.is_first else {}
        fix_rope(self.model, ranks.tell(self.served.get("max_model_len", 0)))
        self.trainer = opening.open_trainer(
            config,
            server,
            model_name=self.served.get("id"),
            probe_ids=probe_ids(self.tokenizer),
            model=self.model,
            updater=self.updater,
            ranks=ranks,
            run_dir=self.run_dir,
            run_id=self.runtime.run_id,
            version=self.progress.version,
            outage=outage,
        )
        self.life.beat("sending the first weights")
        # Weights that were synced before they were saved are the same version again: their samples have not aged.
        self.trainer.send_weights(self.progress.version + (not self.progress.is_synced))

    def _open_evaluations(self) -> None:
        rollout = self.config.rollout
        self.evaluations = evaluation.Evaluations(
            self.config.eval,
            self.ranks,
            self.trainer,
            self.feeder,
            rollout.max_staleness,
            rollout.progress_timeout or self.config.server.timeout,
            self.life.beat,
            lambda: self.stop_requested,
        )

    def _open_feed(self) -> None:
        config, progress = self.config, self.progress
        ledger = Ledger(self.run_dir / "ledger.jsonl")
        ledger.start(self.runtime.run_id, progress.ledger)
        self.feeder = opening.open_feeder(
            config, self.trainer, ledger, progress, self.served["max_model_len"], self.ranks.world_size
        )
        # Also a fresh start: a run killed before its first checkpoint left records of steps that come again.
        self.sinks = open_sinks(config.logger, self.run_dir, progress.step)
        self.feeder.evaluations.open(self.run_dir / evaluation.FILE_NAME, progress.step)
        self.feeder.open(self.runtime.wire_host, self.runtime.wire_port, self.runtime.wire_key, list(progress.ready))
        tell_wire_port(self.run_dir, self.feeder.port)

    def train(self) -> None:
        """Steps until the run is complete, asked to stop or without a server; every rank runs the same sequence."""
        self.began_at = time.perf_counter()
        self._waited_s = 0.0
        self.callbacks = open_callbacks(
            self.config, self.ranks, self.progress.callbacks, model=self.model, processing_class=self.tokenizer,
            optimizer=self.updater.optimizer, lr_scheduler=self.updater.scheduler,
        )  # fmt: skip
        self.recorder = Recorder(
            self.config, self.trainer, self.progress, self.feeder, self.sinks, self.num_rows, self.callbacks
        )
        if self.ranks.is_first and self._is_complete():
            _log.info("the run is complete already: %d steps, %d groups resolved", self.progress.step, self.feeder.num_resolved)
        try:
            self.callbacks.call("on_train_begin", self.progress.step)
            self._take_steps()
        except ContractError as error:  # of a callback, raised on all ranks alike
            self._end_by(error)
        except ServerError as error:  # a failed sync or a gap above run.parity_stop, raised on all ranks alike
            if self.ranks.tell(self.stop_requested):
                self.exit_reason = SIGNAL_STOP
            else:
                self._end_by(error)
        self.recorder.end()

    def _end_by(self, error: Exception) -> None:
        """No step follows, but what was trained is saved before the error is raised (`finish`)."""
        self.failure, self.exit_reason = error, f"{type(error).__name__}: {error}"

    def _take_steps(self) -> None:
        while True:
            barren = self.feeder.ledger.barren() if self.ranks.is_first else ""
            self.life.beat(f"waiting for samples{barren}", step=self.progress.step)
            work = self.ranks.share(self._next_works() if self.ranks.is_first else None)
            if work.kind == "end":
                return
            if work.kind == "idle":
                continue
            if work.kind == "resend":
                self.life.beat("sending the weights to the restarted server", step=self.progress.step)
                self.evaluations.resend()
                continue
            self.life.beat("training", step=work.index)
            self.callbacks.call("on_step_begin", self.progress.step)
            self.trainer.step(work)
            self.progress.step = work.index
            self.life.done["steps"] += 1
            if self.ranks.is_first:
                self.feeder.trained(self._step)
            if self.trainer.is_sync_due(work.index) and self.evaluations.lets_sync():
                self.life.beat("sending the weights", step=work.index)
                self.trainer.send_weights(self.trainer.version + 1)
                self.life.done["syncs"] += 1
                if self.ranks.is_first:
                    self.feeder.synced(self.trainer.version)
                self.callbacks.call("on_sync", work.index, version=self.trainer.version)
            if self.ranks.is_first:
                self.evaluations.ask_due(work.index, is_last=self._is_complete())
            self.recorder.step(work.index)
            self.callbacks.call("on_step_end", work.index)
            if self._is_save_due(work.index) | self.callbacks.take_save():
                self.save()

    def _next_works(self) -> list:
        """Rank 0 decides: end, wait, or the next planned step."""
        count = self.ranks.world_size
        if self.stop_requested:
            self.exit_reason = SIGNAL_STOP
            return [END] * count
        if self.callbacks.stops:
            self.exit_reason = CALLBACK_STOP
            return [END] * count
        if self._is_complete():
            return [END] * count
        began = time.perf_counter()
        try:
            step = self.feeder.next_step(_IDLE_S)
            if step is None:
                self._check_trainable()
        except (AgrpoError, OSError) as error:
            self._end_by(error)
            return [END] * count
        self._waited_s += time.perf_counter() - began
        if step is None:
            return [RESEND if self.trainer.outage.is_over() else IDLE] * count
        self._step = step
        self.trainer.window.add("perf/rollout_wait_s", self._waited_s)
        self._waited_s = 0.0
        self.recorder.took(step)
        return divide(step, self.sharing)

    def _is_complete(self) -> bool:
        """RUN-1, RUN-4: `run.max_steps` steps, else all prompts of the epochs resolved at the end of a step."""
        run = self.config.run
        if run.max_steps is not None:
            return self.progress.step >= run.max_steps
        if self.num_rows is None:
            return False
        return self.feeder.num_resolved >= math.ceil(run.num_train_epochs * self.num_rows)

    def _check_trainable(self) -> None:
        """RUN-7: a whole epoch without a group to train can never give a step."""
        ledger = self.feeder.ledger
        if ledger.is_hopeless(self.num_rows, self.feeder.has_samples):
            counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(ledger.reasons.items()))
            why = f"; {in_words('zero_std')}" if ledger.reasons["zero_std"] else ""
            span = f"a whole epoch of {self.num_rows}" if self.num_rows is not None else f"the last {EPOCH_OF_A_STREAM}"
            raise StallError(f"no group of {span} prompts could be trained ({counts}){why}")

    def _is_save_due(self, step_index: int) -> bool:
        section = self.config.checkpoint
        if section.strategy == "steps":
            return step_index % section.save_steps == 0
        if section.strategy == "epoch":
            is_known = self.ranks.is_first and self.num_rows
            epoch = self.ranks.tell(self.feeder.num_resolved // self.num_rows if is_known else 0)
            is_new, self._epoch = epoch > self._epoch, epoch
            return is_new
        return False

    def save(self) -> None:
        self.life.beat("saving a checkpoint", step=self.progress.step)
        self.progress.version, self.progress.is_synced = self.trainer.version, self.trainer.is_synced
        folder = checkpoints.folder_of(self.run_dir / "checkpoints", self.progress.step)
        self.progress.callbacks = self.callbacks.kept_states()
        fed = self.feeder.state() if self.ranks.is_first else None
        save(folder, self.model, self.updater, self.config.checkpoint, self.progress, fed, self.fingerprint, self.order)
        self.pushes.after_save(self.progress.step, folder.name, self.model, self.tokenizer)
        if self.failure is None:
            self.callbacks.call("on_save", self.progress.step, folder=folder)

    def finish(self) -> None:
        """Checkpoint, exported model, final evaluations, summary (RUN-8). What was trained is safe before anything is
        asked of other processes."""
        wall_s = time.perf_counter() - self.began_at
        if self.stop_requested and getattr(self.failure, "is_consequence", False):  # the signal ended the rollout process too
            self.failure, self.exit_reason = None, SIGNAL_STOP
        # Of a signal or an error rank 0 alone may know.
        is_done = bool(self.ranks.tell(self.exit_reason in ("finished", CALLBACK_STOP)))
        if self.ranks.is_first:
            self.feeder.end()
        if self.config.checkpoint.save_final or not is_done:
            self.save()
        if is_done:
            self.life.beat("exporting the model")
            dtype = checkpoints.export_dtype(self.config.model)
            checkpoints.export(self.model, self.tokenizer, self.run_dir / "model", dtype)
            if self.ranks.is_first:
                tell_exported(self.run_dir, self.progress.step)
            self.pushes.at_end()
            self._evaluate()
        if self.ranks.is_first:
            facts = {"version": self.trainer.version, "training_s": round(wall_s, 3), "tokens": self.feeder.token_totals()}
            write_summary(self.run_dir, self.exit_reason, **facts)
        self.pushes.wait()
        if self.failure is not None:
            raise self.failure
        self.callbacks.call("on_train_end", self.progress.step)

    def _evaluate(self) -> None:
        """Evaluations at the end see the final weights; those that still run are finished first."""
        names = [name for name, evaluation in self.config.eval.items() if evaluation.at_end]
        if self.ranks.is_first and not names:
            # A run that was complete when it was resumed ends before the rollout process is there to be told so.
            deadline = time.monotonic() + _CONNECT_S
            while not self.feeder.await_rollout(_LOOK_S) and time.monotonic() < deadline:
                self.life.beat("ending")
        if not self.config.eval:
            return
        self.evaluations.finish([], self.progress.step)
        if names:
            if not self.trainer.is_synced:
                self.trainer.send_weights(self.trainer.version + 1)
                if self.ranks.is_first:
                    self.feeder.synced(self.trainer.version)
            self.evaluations.finish(names, self.progress.step)
        # Only these: what a few late rollouts came to would pass for a step's figures.
        if self.ranks.is_first and (window := self.feeder.take_window().take("eval/")):
            self.recorder.write(window, self.progress.step, {})

    def close(self) -> None:
        """In reverse order of the list; one that fails, as on a full disk, keeps no other from it."""
        with contextlib.ExitStack() as stack:
            if hasattr(self, "ranks"):
                stack.callback(self.ranks.close)
            if hasattr(self, "trainer"):
                stack.callback(self.trainer.sender.session.close)
            for sink in reversed(self.sinks):
                stack.callback(sink.close)
            if self.feeder is not None:
                stack.callback(self.feeder.close)

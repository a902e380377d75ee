"""The supervisor of one run, start to end.

    server -> healthy -> trainer ranks and rollout -> steps -> trainers end -> rollout ends -> server stops

Every process is watched from its start. The first one that dies, or goes silent beyond its limit, ends the run: the
others are stopped in order, within 15 s unless a trainer is writing a checkpoint, and the cause is named. SIGINT, SIGTERM,
a lost terminal, or SIGUSR1 and SIGUSR2, by which schedulers say that a job's time is nearly up, asks the trainers to finish
their step and save; a second signal kills everything at once (CLI-13).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agrpo.config import Config
from agrpo.config.checkpoint_folder import start_of
from agrpo.errors import AgrpoError
from agrpo.launch import diagnosis, plan, run_folder
from agrpo.launch.check import check_at_start
from agrpo.launch.dump import dump
from agrpo.launch.processes import Child, kill, spawn, stop, wait_all
from agrpo.launch.prompts import Reading
from agrpo.launch.server import Server
from agrpo.launch.watchdog import Watchdog
from agrpo.lifecycle import exported_step
from agrpo.metrics import completions, findings
from agrpo.metrics.console import Console
from agrpo.metrics.summary import read_summary, written
from agrpo.metrics.tail import Tail

TRAINER_GRACE_S = 6.0  # for the step in progress, after a failure
SAVING_GRACE_S = 600.0  # for a checkpoint that is being written
ROLLOUT_GRACE_S = 15.0  # for in-flight requests and environments at a normal end (ARCH-10)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PEER_S = 15.0  # for a process that has closed its connection to end and say why


class Interrupted(KeyboardInterrupt):
    """The run ended because a signal asked it to; a sweep ends with it."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def supervise(
    config: Config,
    warnings: list[str],
    overrides: list[str],
    make_processes: Callable = plan.processes,
    check_server: Callable = check_at_start,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run everything and return the summary. Raises the error that ended the run, with its exit code."""
    ports = plan.Ports.free()
    run_dir = Path(config.run.output_dir)
    processes = make_processes(config, run_dir, ports)
    with run_folder.prepare(config, overrides, ports), _console(config, run_dir, quiet) as console:
        for line in warnings:
            console.note(f"warning: {line}")
        if config.run.resume is not None:
            console.note(f"run.resume: {start_of(config.run.resume, run_dir)}")
        supervisor = Supervisor(config, run_dir, processes, plan.server_urls(config, ports), console)
        with supervisor.signals() as handlers:
            try:
                summary = supervisor.run(check_server)
            except Exception as error:
                run_folder.keep_failure(run_dir, error)
                console.fail(findings.closing(run_dir))
                raise
        console.finish(summary, supervisor.written(summary), verdicts=findings.closing(run_dir))
        if supervisor.signal is not None:
            handlers.pass_on(supervisor.signal)
            raise Interrupted(supervisor.signal)
        return summary


def _console(config: Config, run_dir: Path, quiet: bool) -> Console:
    logger = config.logger
    shows_steps = logger.sinks.get("console", False)
    return Console(
        run_dir,
        max_steps=config.run.max_steps,
        num_epochs=config.run.num_train_epochs,
        live=logger.progress_bar,
        shows_steps=shows_steps,
        quiet=quiet,
    )


class Supervisor:
    """The processes of one run and what is known of them."""

    def __init__(
        self, config: Config, run_dir: Path, processes: plan.Processes, urls: tuple[str, ...], console: Console
    ):
        self.config, self.run_dir, self.processes, self.console = config, run_dir, processes, console
        self.server = Server(
            processes.server,
            urls,
            run_dir,
            timeout_s=config.server.timeout,
            max_restarts=getattr(config.server, "max_restarts", 0),
            console=console,
        )
        self.rollout: Child | None = None
        self.trainers: list[Child] = []
        self.signal: int | None = None  # the first signal received
        self._asked = False  # whether the trainers know of the signal
        self._watchdog = Watchdog(config.run, config.rollout)
        self._metrics = Tail(run_dir / "metrics.jsonl")
        logger = config.logger
        self._completions = Tail(run_dir / completions.FILE_NAME) if logger.log_completions else None
        self._most_completions = logger.num_completions_to_print

    @property
    def children(self) -> list[Child]:
        return [c for c in (self.server.child, self.rollout, *self.trainers) if c is not None]

    def run(self, check_server: Callable) -> dict[str, Any]:
        """Start to end; the summary. Whatever ends it early, no process is left."""
        try:
            self.start(check_server)
            self.watch()
            return self.finish()
        except BaseException as error:
            self.console.close()
            kept = None
            try:
                if isinstance(error, AgrpoError) and error.is_expiry and self.children:
                    kept = dump(self.run_dir, self.children)
            finally:
                self.stop_all()
            if kept is None:
                raise
            raise type(error)(f"{error}\nStacks, logs and states of all processes: {kept}") from error

    # start

    def start(self, check_server: Callable) -> None:
        self.server.start()
        reading = Reading(self.config)
        self.server.await_healthy(self._look_around, lambda: self.children)
        prompts = reading.result(lambda phase: self.console.phase("data", phase), self._look_around)
        check_server(self.config, self.server.urls, self.run_dir, self.console.note, prompts)
        for launch in self.processes.trainers:
            self.console.phase(launch.name, f"starting on {launch.devices}")
            self.trainers.append(spawn(launch, self.run_dir))
        for line in plan.other_nodes(self.config, self.run_dir):
            self.console.note(line)
        self.console.phase("rollout", "starting")
        self.rollout = spawn(self.processes.rollout, self.run_dir)

    # watch

    def watch(self) -> None:
        """Return when every trainer rank ended well."""
        phases: dict[str, str] = {}
        while any(t.code is None for t in self.trainers):
            if self.signal is None:  # it may have reached the server too, which nobody needs for what follows
                self.server.look(lambda: self.children)
            self._raise_if_dead()
            self._watchdog.look(self.trainers, self.rollout, self.children)
            self._forward_signal()
            self._tell_phases(phases)
            self._show_records()
            time.sleep(0.1)
        self._raise_if_dead()
        self._show_records()

    def _show_records(self) -> None:
        records = self._metrics.new_rows()
        for record in records:
            self.console.step(record)
        if records and self._completions is not None:
            self.console.completions(self._completions.new_rows(self._most_completions))

    def _tell_phases(self, told: dict[str, str]) -> None:
        """Each new phase of a process."""
        for child in self.children:
            phase = (child.beat() or {}).get("phase")
            if phase and told.get(child.name) != phase:
                told[child.name] = phase
                self.console.phase(child.name, phase)

    def _raise_if_dead(self) -> None:
        if not self._dead():
            return
        # A kill tears down its peers within moments; let records of the same event arrive before judging. Who lost a peer
        # says nothing of why: that one may still be closing what it holds.
        deadline = time.monotonic() + PEER_S
        time.sleep(0.2)
        while (dead := self._dead()) and all(map(diagnosis.is_consequence, dead)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not dead:  # a signal that has come meanwhile explains them
            return
        first = diagnosis.cause(dead)
        history = self.server.history if first is self.server.child else ""
        raise diagnosis.died(first, self.children, history)

    def _dead(self) -> list[Child]:
        return [child for child in self.children if not self._ended_well(child)]

    def _ended_well(self, child: Child) -> bool:
        """Running, or ended as it may: a trainer by itself or because it was asked, the rollout after its work.

        Whoever stops a job may send the signal to all of its processes.
        """
        code = child.code
        if code is None:
            return True
        if child is self.server.child:
            return self.signal is not None or not self.server.has_failed
        if self.signal is None:
            return code == 0
        return code in (0, -signal.SIGTERM, 130, 143) or diagnosis.is_consequence(child)

    # signals

    def signals(self) -> Any:
        return _Handlers(self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal is None:
            self.signal = number
        elif number != signal.SIGHUP:  # of which a lost terminal gives two, its own and its shell's
            kill(self.children)
            raise Interrupted(number)

    def _look_around(self) -> None:
        """While the server starts."""
        self._raise_if_dead()
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _forward_signal(self) -> None:
        """The first signal, once: trainers finish their step, save and end; everything else follows from that."""
        if self.signal is None or self._asked:
            return
        self._asked = True
        self.console.event("stop", "finishing the step and saving; press Ctrl-C again to stop at once without saving")
        for trainer in self.trainers:
            trainer.terminate()

    # end

    def finish(self) -> dict[str, Any]:
        """The normal end: the trainer has told the rollout to finish; give it time, then stop the server."""
        # Trainers that a signal ended before their first step have told it nothing.
        is_told = all(trainer.code == 0 for trainer in self.trainers)
        if not wait_all([self.rollout], ROLLOUT_GRACE_S if is_told else 0.0):
            stop([self.rollout], 5.0)
        stop(
            [c for c in (self.rollout, *self.trainers) if c is not None], 0.0
        )  # what they may have left in their groups
        self.server.stop()
        return read_summary(self.run_dir)

    def written(self, summary: dict[str, Any]) -> dict[str, str | Path]:
        """As `agrpo.metrics.summary.written`; a model of fewer steps, left by a run before, is not named."""
        paths, exported = written(self.run_dir), exported_step(self.run_dir)
        if exported is not None and exported < summary.get("global_step", 0):
            paths.pop("model", None)
        return paths

    def stop_all(self) -> None:
        """After a failure: the rollout ends now, trainers may save, the server goes last."""
        for child in self.children:
            if child in self.trainers or child is self.rollout:
                child.terminate()
        self._await_trainers()
        kill(self.trainers)
        if self.rollout is not None:
            stop([self.rollout], 1.0)
        self.server.stop()

    def _await_trainers(self) -> None:
        """A few seconds for the step; as long as it takes, within reason, for a checkpoint that is being written."""
        began = time.monotonic()
        while any(t.code is None for t in self.trainers):
            phases = [(t.beat() or {}).get("phase", "") for t in self.trainers if t.code is None]
            grace = SAVING_GRACE_S if any(p.startswith(("saving", "exporting")) for p in phases) else TRAINER_GRACE_S
            if time.monotonic() - began > grace:
                return
            time.sleep(0.1)


class _Handlers:
    """SIGNALS go to `handler` within the block; elsewhere than in the main thread they cannot. A SIGHUP that is ignored, as under
    nohup, stays so."""

    def __init__(self, handler: Any):
        self._handler, self._before = handler, {}

    def __enter__(self) -> _Handlers:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._handler)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self, number: int) -> None:
        """After the run: to whoever had asked to be told, as a launcher that queues the job again."""
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, None)

"""Whole runs of `agrpo train` on a tiny model, each with one real fault in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from tests.faults.table import Fault, NotHereError

_path = Path(__file__).parents[1] / "test_restart.py"
_spec = importlib.util.spec_from_file_location("restarted", _path)
restarted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(restarted)

ENDLESS = "run.max_steps=100000"
LATER = """
import os, time
_time, _mark = time.time, os.path.join(os.path.dirname(__file__), "jump")
_state = [0.0]
def jumped():
    if not _state[0] and os.path.exists(_mark):
        _state[0] = float(open(_mark).read())
    return _time() + _state[0]
time.time = jumped
"""
REWARDS = """
import math, os, time
def odd(completion_ids, **columns):
    mark = os.path.join(os.path.dirname(__file__), "spoil")
    if os.path.exists(mark):
        what = open(mark).read()
        if what == "block":
            time.sleep(600)
        return [math.nan] * len(completion_ids)
    return [float(sum(i % 2 for i in ids)) for ids in completion_ids]
"""
GONE_S = 20.0  # after the end of the command, nothing may be left


def run(
    folder: Path,
    act: Callable,
    *overrides: str,
    says: str = "",
    at: int = 3,
    prepare: Callable = lambda folder: None,
    num_rows: int = 300,
) -> str:
    """Start, `act(run)` after step `at`, wait for the end; what the command's exit code was."""
    prepare(folder)
    started = restarted.Run(folder, *overrides, num_rows=num_rows)
    (folder / "restart_rewards.py").write_text(REWARDS)
    try:
        started.await_step(at)
        act(started)
        code, output = started.end(240)
        assert says in output, output[-4000:]
        _nothing_left(folder)
        return f"exit code {code}"
    finally:
        if started.popen.poll() is None:
            started.popen.kill()


def _nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while left := [p.pid for p in psutil.process_iter() if _belongs(p, folder)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        is_of_run = any(str(folder) in part for part in process.cmdline())
        return is_of_run and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
    except psutil.Error:
        return False


def send(name: str, number: signal.Signals, started) -> None:
    os.kill(json.loads((started.out / "state" / f"{name}.alive.json").read_text())["pid"], number)


def interrupted(started) -> None:
    started.popen.send_signal(signal.SIGINT)


def everybody(number: signal.Signals, started) -> None:
    """As schedulers and service managers stop a job: every process of the run, and its own are first."""
    for process in (*psutil.Process(started.popen.pid).children(recursive=True), started.popen):
        os.kill(process.pid, number)


def saved(folder: Path, number: signal.Signals) -> str:
    ending = run(folder, partial(everybody, number), ENDLESS)
    reason = json.loads((folder / "run" / "summary.json").read_text())["exit_reason"]
    return f"{ending}, {reason}, {'saved' if list((folder / 'run' / 'checkpoints').glob('step-*')) else 'lost'}"


def pulled(number: signal.Signals, started) -> None:
    """Stopped for a moment only, as a machine that swaps."""
    send("server", number, started)
    time.sleep(3)
    send("server", signal.SIGCONT, started)


def mark(name: str, text: str, started) -> None:
    (started.folder / name).write_text(text)


def small_disk(folder: Path) -> None:
    """Its own file system for the run folder; needs the right to mount."""
    (folder / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder / "run")], check=True)


def on_small_disk(folder: Path) -> str:
    try:
        small_disk(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotHereError("no right to mount a small file system") from error
    try:
        overrides = (ENDLESS, "checkpoint.save_steps=1")
        return run(folder, lambda started: None, *overrides, says="then continue with run.resume=auto", at=1)
    finally:
        subprocess.run(["umount", "-l", str(folder / "run")], check=False)


def clock(seconds: float, folder: Path) -> str:
    def prepare(folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(LATER)

    return run(folder, partial(mark, "jump", str(seconds)), "run.max_steps=25", prepare=prepare)


IN_SUITE = ("run: trainer rank: stopped (SIGSTOP)", "run: clock: jumps a day ahead", "run: scorer: returns NaN")


def whole(where: str, what: str, expected: str, work: Callable[[Path], str]) -> Fault:
    return Fault(where, what, expected, work, limit_s=300, is_whole=True, is_in_suite=f"{where}: {what}" in IN_SUITE)


def stopped(name: str, folder: Path) -> str:
    overrides = ("run.collective_timeout=12", "rollout.worker_timeout=12", "rollout.progress_timeout=8", "run.num_processes=2")
    return run(folder, partial(send, name, signal.SIGSTOP), ENDLESS, *overrides, says=f"{name} was stopped by a signal")


STALL = ("rollout.progress_timeout=6",)
FAULTS = [
    *(whole(f"run: {where}", "stopped (SIGSTOP)", "exit code 6", partial(stopped, name))
      for where, name in (("server", "server"), ("rollout", "rollout"), ("trainer rank", "trainer1"))),
    whole("run: server", "stopped for 3 s", "exit code 0", lambda folder: run(folder, partial(pulled, signal.SIGSTOP), "run.max_steps=16")),
    whole("run: server", "killed", "exit code 0",
          lambda folder: run(folder, lambda started: started.kill_server(), "run.max_steps=16", says="has the weights of version")),
    *(whole(f"run: {name}", "killed", "exit code 1",
            lambda folder, name=name: run(folder, partial(send, name, signal.SIGKILL), ENDLESS, says=f"{name} was killed by SIGKILL"))
      for name in ("rollout", "trainer0")),
    whole("run: scorer", "blocks for ever, without a limit", "exit code 6", lambda folder: run(
        folder, partial(mark, "spoil", "block"), ENDLESS, *STALL, "scorer.timeout=null", says="are being scored")),
    whole("run: scorer", "blocks for ever, with one", "exit code 5", lambda folder: run(
        folder, partial(mark, "spoil", "block"), ENDLESS, *STALL, "scorer.timeout=1", says="groups in a row were not scored", num_rows=3000)),
    whole("run: scorer", "returns NaN", "exit code 5",
          lambda folder: run(folder, partial(mark, "spoil", "nan"), ENDLESS, says="odd returned nan")),
    whole("run: user", "Ctrl-C", "exit code 130", lambda folder: run(folder, interrupted, ENDLESS)),
    *(whole("run: user", f"{number.name} to every process", f"exit code {128 + number}, stopped by a signal, saved",
            partial(saved, number=number)) for number in (signal.SIGTERM, signal.SIGUSR1)),
    whole("run: clock", "jumps a day ahead", "exit code 0", partial(clock, 86400.0)),
    whole("run: clock", "jumps a day back", "exit code 0", partial(clock, -86400.0)),
    whole("run: disk", "fills up", "exit code 4", on_small_disk),
]  # fmt: skip

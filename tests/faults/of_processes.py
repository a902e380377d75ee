"""The supervisor over scripted processes: each dies, hangs, is stopped, or waits for another that waits for it."""

from __future__ import annotations

import importlib.util
import os
import signal
from functools import partial
from pathlib import Path

from tests.faults.table import Fault

_path = Path(__file__).parents[1] / "launch" / "test_launch_supervisor.py"
_spec = importlib.util.spec_from_file_location("supervised", _path)
supervised = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(supervised)
GOOD = ("healthy", "train_on", "train_on", "roll_out")


def ended(run, says: str) -> str:
    code, _, err = run.end()
    assert says in err, err
    return f"exit code {code}"


def signalled(name: str, number: signal.Signals, says: str, folder: Path, *settings: str) -> str:
    run = supervised.Run(folder / "run", GOOD, settings)
    os.kill(run.await_all()[name], number)
    return ended(run, says)


def scripted(scripts: tuple[str, ...], says: str, *settings: str):
    return lambda folder: ended(supervised.Run(folder / "run", scripts, settings), says)


# The same scripts run in tests/launch, so the default suite has only those whose end is told by the watchdog.
SHORT = ("run.collective_timeout=2", "rollout.worker_timeout=2")
FAULTS = [
    *(Fault(where, "killed", f"exit code {code}", partial(signalled, name, signal.SIGKILL, f"{name} was killed by SIGKILL"), limit_s=60, is_whole=True)
      for where, name, code in (("server", "server", 4), ("trainer rank", "trainer1", 1), ("rollout", "rollout", 1))),
    *(Fault(where, "stopped (SIGSTOP)", "exit code 6",
            lambda folder, name=name: signalled(name, signal.SIGSTOP, f"{name} was stopped by a signal", folder, *SHORT),
            limit_s=60, is_whole=name == "trainer1")
      for where, name in (("trainer rank", "trainer1"), ("rollout", "rollout"))),
    Fault("trainer rank", "hangs in a collective", "exit code 6",
          scripted(("healthy", "train_on", "hang", "roll_out"), "trainer1 gave no sign of life", *SHORT), limit_s=60, is_whole=True),
    Fault("rollout", "breaks a contract", "exit code 5", scripted((*GOOD[:3], "contract"), "pkg.mod.length"), limit_s=60, is_whole=True),
    Fault("run", "trainer and rollout wait for each other", "exit code 6",
          scripted(("healthy", "await_samples", "await_samples", "await_trainer"), "nothing was achieved", "rollout.progress_timeout=1.5"),
          limit_s=60),
    Fault("server", "never gets healthy", "exit code 4",
          scripted(("unhealthy", *GOOD[1:]), "not healthy after 1.5 s", "server.timeout=1.5"), limit_s=60, is_whole=True),
]  # fmt: skip

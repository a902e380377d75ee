"""The processes of a run: how one is started, what is known of it, how its whole group is ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import agrpo
from agrpo.errors import ServerError
from agrpo.launch import leash

FIRST_PORT, LAST_PORT = 15000, 32000  # Linux gives outgoing connections 32768 and above, others 49152 and above


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start: its command line and the variables added to the environment."""

    name: str
    argv: list[str]
    environment: dict[str, str]
    devices: str = "cpu"  # in words, for the plan
    is_agent: bool = False  # starts the process of this name and others, and stops them its own way


@dataclass(slots=True)
class Child:
    """A started process with its log and its signs of life in the run folder.

    `popen` is its leash, which leads a process group of its own, passes SIGTERM on, and ends as the process ends.
    """

    name: str
    popen: subprocess.Popen
    run_dir: Path
    started_at: float = field(default_factory=time.monotonic)
    is_agent: bool = False
    oom_kills: int = field(default_factory=lambda: num_oom_kills())  # on this machine, before it started

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self.popen.poll()

    @property
    def log_path(self) -> Path:
        return self.run_dir / "logs" / f"{self.name}.log"

    def beat(self) -> dict[str, Any] | None:
        """The last sign of life, None before the first."""
        return _read_json(self.run_dir / "state" / f"{self.name}.alive.json")

    def exit_record(self) -> dict[str, Any] | None:
        """Code and reason the process left as it ended by itself, None if it could not."""
        return _read_json(self.run_dir / "state" / f"{self.name}.exit.json")

    def terminate(self) -> None:
        """SIGTERM to the process alone: what it started is its own to end.

        An agent would give its ranks half a minute; the rank itself finishes its step, saves and tells all the others.
        """
        beat = self.beat() if self.is_agent else None
        if beat is None:
            self.popen.send_signal(signal.SIGTERM)
        elif self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat["pid"], signal.SIGTERM)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def last_lines(self, num_lines: int = 15) -> list[str]:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                return log.read().decode(errors="replace").splitlines()[-num_lines:]
        except OSError:
            return []


def spawn(launch: Launch, run_dir: Path) -> Child:
    """Start one process. To be called from the main thread: a child's parent-death signal follows the thread."""
    log_path = run_dir / "logs" / f"{launch.name}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = {**_environment(), **launch.environment}
    with log_path.open("ab") as log:
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", leash.__file__, *launch.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Child(launch.name, popen, run_dir, is_agent=launch.is_agent)


def _environment() -> dict[str, str]:
    """This process's environment, with agrpo and the current folder importable in every child."""
    environment = dict(os.environ)
    for name in (
        "HYDRA_FULL_ERROR",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        environment.pop(name, None)
    paths = [environment.get("PYTHONPATH", ""), str(Path(agrpo.__file__).parents[1]), os.getcwd()]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    return environment


def wait_all(children: list[Child], seconds: float) -> bool:
    """Wait until all have ended, at most `seconds`; whether they did."""
    deadline = time.monotonic() + seconds
    while any(child.code is None for child in children):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def stop(children: list[Child], grace_s: float) -> None:
    """SIGTERM, `grace_s` seconds, then SIGKILL to whatever is left of the groups."""
    for child in children:
        child.terminate()
    wait_all(children, grace_s)
    kill(children)


def kill(children: list[Child]) -> None:
    for child in children:
        child.kill_group()
    wait_all(children, 5.0)


def descendants(child: Child) -> list[psutil.Process]:
    """Its process and all that this has started; empty once it is gone."""
    try:
        leash_process = psutil.Process(child.popen.pid)
        return [leash_process, *leash_process.children(recursive=True)]
    except psutil.Error:
        return []


def num_oom_kills() -> int:
    """Processes that Linux has ended on this machine because memory was used up; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on, all different.

    They are used seconds or minutes later, so they are not among those that the system gives to outgoing connections.
    """
    sockets: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT), 1000):
            s = socket.socket()
            sockets.append(s)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                sockets.pop().close()
            if len(sockets) == count:
                return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
    raise ServerError(f"no free port of 127.0.0.1 was found between {FIRST_PORT} and {LAST_PORT}")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None

"""What a stalled run was doing, kept in its folder `stall/` before its processes are ended.

    NAME.stacks.txt     Python stacks of the process's threads: it writes them on SIGUSR1, also while it hangs; those of
                        another program, such as vLLM, are read by py-spy where that is installed; of the supervisor too
    NAME.log.txt        the last lines of its log
    rollout.tasks.txt   where each coroutine of the rollout process waits
    processes.json      every process of the run with its state, threads, memory and last sign of life
    metrics.jsonl       the last records
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from agrpo.launch.processes import Child, descendants

STACKS_S = 2.0  # for the processes to write their stacks
READ_S = 20.0  # for the stacks of one program that does not write its own
NUM_LINES, NUM_RECORDS = 200, 20
WORKER = "agrpo.scorer.worker"  # runs reward functions
NUM_ARGUMENTS = 4  # of a command line: later ones may hold a key


def dump(run_dir: Path, children: list[Child]) -> Path:
    """Write everything that can be had; whatever cannot be had, or written, is left out."""
    folder, state = run_dir / "stall", run_dir / "state"
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    with contextlib.suppress(OSError):
        _write_stacks(state, children)
    for child in children:
        _put(folder / f"{child.name}.log.txt", lambda child=child: "\n".join(child.last_lines(NUM_LINES)) + "\n")
        if not (state / f"{child.name}.stacks").exists():
            _put(folder / f"{child.name}.stacks.txt", lambda child=child: _read_stacks(child))
    for path in (*state.glob("*.stacks"), *state.glob("*.tasks")):
        _put(folder / f"{path.name}.txt", lambda path=path: path.read_text(errors="replace"))
    with contextlib.suppress(OSError), (folder / "supervisor.stacks.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    _put(folder / "processes.json", lambda: json.dumps([_facts(c) for c in children], indent=1) + "\n")
    _put(folder / "metrics.jsonl", lambda: "".join(_last_records(run_dir)))
    return folder


def _put(path: Path, text: Callable[[], str]) -> None:
    """One that fails takes no other with it."""
    with contextlib.suppress(OSError, psutil.Error):
        path.write_text(text())


def _last_records(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text(errors="replace").splitlines(keepends=True)[-NUM_RECORDS:]


def _read_stacks(child: Child) -> str:
    """Of a program that does not write them itself: read from outside, process by process."""
    if child.code is not None:
        return f"{child.name} has ended\n"
    processes = descendants(child)[1:]  # the first is its leash
    spy = _py_spy(processes)
    if spy is None:
        return f"{child.name} does not write its stacks; pip install py-spy, beside agrpo or beside {child.name}, and they are read\n"
    parts, deadline = [], time.monotonic() + READ_S
    for process in processes:
        left = deadline - time.monotonic()
        if left <= 0:
            parts.append(f"the other processes were left out after {READ_S:.0f} s\n")
            break
        try:
            # Nonblocking: a process that is stopped to be read stays so where the reader is killed.
            command = [spy, "dump", "--nonblocking", "--pid", str(process.pid)]
            found = subprocess.run(command, text=True, capture_output=True, timeout=left, stdin=subprocess.DEVNULL)
            _, _, stacks = found.stdout.partition("\n")  # the first line is the whole command line, which may hold a key
            parts.append(f"process {process.pid}: {stacks or found.stderr.strip()}\n")
        except (OSError, subprocess.TimeoutExpired) as error:
            parts.append(f"process {process.pid}: {error}\n")
    return "".join(parts)


def _py_spy(processes: list[psutil.Process]) -> str | None:
    """Beside this Python, on the PATH, or beside the Python of one of the processes."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    for process in processes:
        with contextlib.suppress(psutil.Error, IndexError):
            folders.append(str(Path(process.cmdline()[0]).parent))
    return shutil.which("py-spy", path=os.pathsep.join(folders))


def _write_stacks(state: Path, children: list[Child]) -> None:
    """Ask those that answer; a stopped process cannot. Others, such as vLLM, would die of the signal."""
    asked = {}
    for child in children:
        path, beat = state / f"{child.name}.stacks", child.beat()
        if child.code is None and beat is not None and path.exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                asked[path] = path.stat().st_size
                os.kill(beat["pid"], signal.SIGUSR1)
    for process in (p for child in children for p in descendants(child)):
        with contextlib.suppress(psutil.Error):
            if WORKER in process.cmdline():  # writes to the log of the rollout process
                process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and any(path.stat().st_size == size for path, size in asked.items()):
        time.sleep(0.05)
    time.sleep(0.1)  # a file that has grown may still be growing


def _facts(child: Child) -> dict[str, Any]:
    return {
        "name": child.name,
        "code": child.code,
        "sign_of_life": child.beat(),
        "processes": [_of_process(p) for p in descendants(child)],
    }


def _of_process(process: psutil.Process) -> dict[str, Any]:
    names = ["pid", "ppid", "cmdline", "status", "num_threads", "num_fds", "memory_info", "cpu_times"]
    with contextlib.suppress(psutil.Error):
        facts = {k: getattr(v, "_asdict", lambda v=v: v)() for k, v in process.as_dict(names).items()}
        return {**facts, "cmdline": (facts["cmdline"] or [])[:NUM_ARGUMENTS]}  # a zombie has none
    return {"pid": process.pid}

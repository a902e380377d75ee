"""What a stalled run was doing, kept in its folder `stall/` before its processes are ended.

    NAME.stacks.txt     Python stacks of the process's threads (it writes them on SIGUSR1, also while it hangs)
    NAME.log.txt        the last lines of its log
    rollout.tasks.txt   where each coroutine of the rollout process waits
    processes.json      every process of the run with its state, threads, memory and last sign of life
    metrics.jsonl       the last records
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from agrpo.launch.processes import Child, descendants

STACKS_S = 2.0  # for the processes to write their stacks
NUM_LINES, NUM_RECORDS = 200, 20
WORKER = "agrpo.scorer.worker"  # runs reward functions
NUM_ARGUMENTS = 4  # of a command line: later ones may hold a key


def dump(run_dir: Path, children: list[Child]) -> Path:
    """Write everything that can be had; whatever cannot be had, or written, is left out."""
    folder, state = run_dir / "stall", run_dir / "state"
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _write_stacks(state, children)
        for child in children:
            tail = child.last_lines(NUM_LINES)
            (folder / f"{child.name}.log.txt").write_text("\n".join(tail) + "\n")
        for path in (*state.glob("*.stacks"), *state.glob("*.tasks")):
            shutil.copyfile(path, folder / f"{path.name}.txt")
        (folder / "processes.json").write_text(json.dumps([_facts(c) for c in children], indent=1) + "\n")
        records = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[-NUM_RECORDS:]
        (folder / "metrics.jsonl").write_text("".join(records))
    return folder


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

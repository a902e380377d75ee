"""`python -m tests.soak [--minutes 40] [--out FILE]`: the quickstart for a long time, with every process watched from outside.

The learning rate is so small that the model stays as it is: each step is as much work as the one before, so what grows is a
leak. Each look (every 5 s) records memory, file descriptors and threads of every process and the size of the run's files.
The first fifth is warm-up. Prints one JSON line per bar; --out keeps all looks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LOOK_S, WARM_UP, MEMORY_LIMIT = 5.0, 0.2, 1.03
FILES = ("metrics.jsonl", "ledger.jsonl", "logs", "checkpoints", "state")
KIB_PER_STEP = 16.0  # what metrics, ledger and logs of the quickstart may grow by in a step


def names_of(supervisor: psutil.Process, run_dir: Path) -> dict[str, list[psutil.Process]]:
    """Processes by role: the run's own by their signs of life, reward workers together."""
    found = {"supervisor": [supervisor]}
    pids = {}
    for path in (run_dir / "state").glob("*.alive.json"):
        pids[json.loads(path.read_text())["pid"]] = path.name.removesuffix(".alive.json")
    for process in supervisor.children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        name = pids.get(process.pid) or ("scorer" if "agrpo.scorer" in line or "guard.py" in line else "leash")
        found.setdefault(name, []).append(process)
    return found


def look(supervisor: psutil.Process, run_dir: Path) -> dict:
    facts: dict = {"at": time.monotonic(), "processes": {}, "bytes": {}}
    for name, processes in names_of(supervisor, run_dir).items():
        sums = {"rss": 0, "fds": 0, "threads": 0}
        for process in processes:
            try:
                sums["rss"] += process.memory_info().rss
                sums["fds"] += process.num_fds()
                sums["threads"] += process.num_threads()
            except psutil.Error:
                continue
        facts["processes"][name] = sums
    for name in FILES:
        path = run_dir / name
        files = path.rglob("*") if path.is_dir() else [path]
        facts["bytes"][name] = sum(f.stat().st_size for f in files if f.is_file())
    metrics = run_dir / "metrics.jsonl"
    facts["steps"] = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return facts


def bars(looks: list[dict]) -> list[dict]:
    """Growth from the quarter after the warm-up to the last quarter."""
    warm = looks[int(len(looks) * WARM_UP) :]
    quarter = max(len(warm) // 4, 1)
    first, last = warm[:quarter], warm[-quarter:]

    def level(part: list[dict], name: str, what: str) -> float:
        return statistics.median(f["processes"][name][what] for f in part if name in f["processes"])

    found = []
    for name in sorted(set.intersection(*(set(f["processes"]) for f in warm))):
        growth = level(last, name, "rss") / level(first, name, "rss")
        found.append(_bar(f"soak_memory_{name}", round(growth, 4), "x", MEMORY_LIMIT))
        for what in ("fds", "threads"):
            found.append(_bar(f"soak_{what}_{name}", level(last, name, what) - level(first, name, what), "more", 0))
    steps = max(last[-1]["steps"] - first[0]["steps"], 1)
    text = ("metrics.jsonl", "ledger.jsonl", "logs")
    grown = sum(last[-1]["bytes"][n] - first[0]["bytes"][n] for n in text) / 1024 / steps
    found.append(_bar("soak_disk", round(grown, 2), "KiB a step", KIB_PER_STEP))
    state = last[-1]["bytes"]["state"] - first[0]["bytes"]["state"]
    found.append(_bar("soak_disk_state", state, "bytes", 4096))
    minutes = (looks[-1]["at"] - looks[0]["at"]) / 60
    found.append({"bar": "soak_steps", "value": looks[-1]["steps"], "unit": f"steps in {minutes:.1f} min", "limit": None, "ok": True})
    return found


def _bar(name: str, value: float, unit: str, limit: float) -> dict:
    return {"bar": name, "value": value, "unit": unit, "limit": limit, "ok": value <= limit}


def soak(minutes: float, folder: Path) -> list[dict]:
    run_dir = folder / "run"
    command = [
        sys.executable, "-m", "agrpo", "train", "+recipe=quickstart", f"run.output_dir={run_dir}", "run.max_steps=10000000",
        "optimizer.learning_rate=1e-12", "checkpoint.save_steps=50", "checkpoint.save_total_limit=2",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "console.txt").open("w") as console:
        popen = subprocess.Popen(command, env=environment, cwd=folder, stdout=console, stderr=console)
    supervisor, looks = psutil.Process(popen.pid), []
    try:
        deadline = time.monotonic() + minutes * 60
        while time.monotonic() < deadline:
            if popen.poll() is not None:
                raise RuntimeError((folder / "console.txt").read_text()[-4000:])
            if (facts := look(supervisor, run_dir))["steps"] or looks:
                looks.append(facts)
            time.sleep(LOOK_S)
    finally:
        popen.terminate()
        popen.wait(120)
    return looks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run is a child that must end with this
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        looks = soak(options.minutes, Path(folder))
    if options.out is not None:
        options.out.write_text("".join(json.dumps(f) + "\n" for f in looks))
    found = bars(looks)
    for bar in found:
        print(json.dumps(bar), flush=True)
    return 0 if all(b["ok"] for b in found) else 1


if __name__ == "__main__":
    sys.exit(main())

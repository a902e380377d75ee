"""kill -9 of each process, one after the other in one run that is resumed after each: nothing is left within 15 s, the cause
is named, and the last resume finishes the run with no group lost or trained twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from agrpo import wire
from agrpo.ledger import replay
from tests.standins import tiny_dataset, tiny_qwen3

GONE_S = 15


def write_reward(folder: Path) -> None:
    text = "def odd_tokens(completion_ids, **columns):\n    return [float(sum(i % 2 for i in ids)) for ids in completion_ids]\n"
    (folder / "kill_rewards.py").write_text(text)


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "agrpo", "train", f"model.path={folder}/model", "data=jsonl",
        f"data.path={folder}/data.jsonl", "scorer.functions=[kill_rewards.odd_tokens]", "server=embedded", "sync=gloo",
        "sampler.max_completion_length=5", "packer.token_budget=256", "run.use_cpu=true", "model.precision=no",
        "rollout.max_staleness=2", "rollout.group_size=4", "checkpoint.save_steps=1", f"run.output_dir={folder}/run",
        "server.max_restarts=0",
        *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[1])])}
    return subprocess.Popen(
        command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in part for part in process.cmdline()) and process.pid != os.getpid():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition, limit_s: float, what: str):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {limit_s} s")


def num_records(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def pid_of(folder: Path, name: str, supervisor: subprocess.Popen) -> int:
    if name == "supervisor":
        return supervisor.pid
    return json.loads((folder / "run" / "state" / f"{name}.alive.json").read_text())["pid"]


def assert_exactly_once(folder: Path, num_groups_before: int) -> None:
    """Every group that existed before the kill is resolved under the surviving weights, none of its samples twice."""
    groups = replay(folder / "run" / "ledger.jsonl")
    checkpoint = max((folder / "run" / "checkpoints").glob("step-*"))
    waiting = {g.group_id: len(g.samples) for g in wire.frames((checkpoint / "ready_groups.bin").read_bytes())}
    for group_id in range(num_groups_before):
        assert group_id in groups, f"group {group_id} was lost"
    for group_id, group in groups.items():
        accounted = group["trained"] + group["dropped"] + waiting.get(group_id, 0)
        if group["ready"]:
            assert accounted == group["ready"], f"group {group_id}: {group}, waiting {waiting.get(group_id, 0)}"
        else:
            assert group["reasons"] and not group["trained"]


def killed(folder: Path, name: str, *overrides: str) -> None:
    """Start or resume with two ranks, kill `name` three steps later, and see the end."""
    before = num_records(folder)
    supervisor = start(folder, "run.num_processes=2", "run.max_steps=500", *overrides)
    wait_for(lambda: num_records(folder) >= before + 3 or supervisor.poll() is not None, 120, f"step {before + 3}")
    assert supervisor.poll() is None, supervisor.stdout.read()
    os.kill(pid_of(folder, name, supervisor), signal.SIGKILL)
    wait_for(lambda: not processes_of(folder), GONE_S, f"the end of all processes after the {name} was killed")
    output = supervisor.communicate(timeout=10)[0]
    if name != "supervisor":
        assert supervisor.returncode != 0
        assert f"{name} was killed by SIGKILL" in output, output


def test_each_process_killed_and_the_run_resumed_each_time(tmp_path):
    tiny_qwen3(tmp_path / "model")
    tiny_dataset(tmp_path / "data.jsonl")
    write_reward(tmp_path)
    resume: tuple[str, ...] = ()
    for name in ("supervisor", "server", "rollout", "trainer1"):
        killed(tmp_path, name, *resume)
        resume = ("run.resume=auto",)
    seen = replay(tmp_path / "run" / "ledger.jsonl")
    steps = num_records(tmp_path)

    resumed = start(tmp_path, "run.num_processes=2", f"run.max_steps={steps + 6}", *resume)
    output = resumed.communicate(timeout=180)[0]
    assert resumed.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["global_step"] == steps + 6
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, steps + 7))
    assert_exactly_once(tmp_path, max(seen) + 1)
    assert not processes_of(tmp_path)

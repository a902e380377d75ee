"""`agrpo doctor` on a real configuration, well and with several faults at once; its estimates by hand."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Bag

import pytest

from agrpo.config import Devices, check, compose
from agrpo.launch import doctor_child, doctor_host, plan
from agrpo.launch.preview import GIB

ROOT = Path(__file__).parents[2]
BROKEN = """
import time


class Room:
    def reset(self, **columns):
        raise RuntimeError("no room at the inn")


class Slow:
    def reset(self, **columns):
        print("asking a service that never answers", flush=True)
        time.sleep(3600)


def raises(completions, **columns):
    raise KeyError("answer")
"""


def doctor(folder: Path, *arguments: str, limit_s: float = 300) -> tuple[int, dict]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "agrpo", "doctor", "--json", *arguments],
        env=environment, cwd=folder, text=True, capture_output=True, timeout=limit_s,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def by_name(answer: dict) -> dict[str, dict]:
    return {row["name"]: row for row in answer["rows"]}


def test_a_configuration_that_is_well_has_every_part_and_leaves_nothing_behind(tmp_path):
    code, answer = doctor(tmp_path, "+recipe=quickstart", f"run.output_dir={tmp_path}/run", "rollout.group_size=4")
    assert code == 0 and answer["ok"], answer
    rows = by_name(answer)
    parts = "versions devices network configuration memory disk data prompt template scorer rewards tools"
    for name in [*parts.split(), "open files", "server start", "server: model", "step"]:
        assert rows[name]["status"] in ("ok", "warn", "skip"), rows[name]
    assert "correct 0.0" in rows["rewards"]["found"] and "tokens, mean" in rows["prompt"]["found"]
    assert "grad_norm" in rows["step"]["found"] and rows["step"]["seconds"] > 0
    assert not (tmp_path / "run").exists()


def test_failures_come_with_their_fix_and_a_part_that_hangs_ends_at_its_limit(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    code, answer = doctor(
        tmp_path, "+recipe=quickstart", f"run.output_dir={tmp_path}/run", "scorer.functions=[broken.raises]",
        "env.factory=broken.Slow", "--no-server", "--limit", "90",
    )  # fmt: skip
    rows = by_name(answer)
    assert code == 4 and not answer["ok"]
    assert rows["scorer"]["status"] == "ok" and rows["template"]["status"] in ("ok", "warn")
    line = BROKEN.splitlines().index('    raise KeyError("answer")') + 1
    said = f": reward function raises raised KeyError: 'answer' ({tmp_path}/broken.py, line {line})"
    assert rows["rewards"]["status"] == "fail" and rows["rewards"]["found"].endswith(said)
    assert rows["rewards"]["fix"].startswith("a run would drop such groups")
    assert rows["tools"]["found"] == "not through within 90 s; the last it said: asking a service that never answers"
    assert "--limit" in rows["tools"]["fix"] and rows["step"]["status"] == "skip"


def test_an_environment_that_cannot_be_reset_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    asyncio.run(doctor_child._tools(small("env.factory=broken.Room"), found.append))
    assert [(f.name, f.status) for f in found] == [("environment", "fail")]
    assert "no room at the inn" in found[0].found and found[0].fix.startswith("mend the environment")


def test_a_refused_configuration_is_one_part_and_every_fault_is_a_row(tmp_path):
    code, answer = doctor(tmp_path, "+recipe=quickstart", "rollout.group_size=0", "optimizer.learning_rate=-1")
    faults = [row["found"] for row in answer["rows"] if row["status"] == "fail"]
    assert code == 4 and any("group_size" in f for f in faults) and any("learning_rate" in f for f in faults)
    assert by_name(answer)["versions"]["status"] == "ok"
    code, answer = doctor(tmp_path, "+recipe=quickstrat")
    assert code == 4 and by_name(answer)["configuration"]["status"] == "fail"


def small(*overrides):
    config, _ = check(compose(["+recipe=quickstart", *overrides]), Devices())
    return plan.resolved(config)


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (("run.max_steps=90", "checkpoint.save_steps=40"), 3),  # after 40 and 80, and at the end
        (("run.max_steps=80", "checkpoint.save_steps=40"), 2),
        (("run.max_steps=90", "checkpoint.save_steps=40", "checkpoint.save_final=false"), 2),
        (("run.max_steps=90", "checkpoint.save_steps=10", "checkpoint.save_total_limit=2"), 2),
        (("checkpoint.strategy=no",), 1),
        (("checkpoint.strategy=epoch", "run.num_train_epochs=3"), 3),
    ],
)
def test_how_many_checkpoints_will_lie_there(overrides, count):
    assert doctor_host.num_checkpoints(small(*overrides)) == count


def test_room_on_the_disk_by_hand(monkeypatch):
    """A billion parameters: 12 GB a checkpoint, two kept and one being written, 4 GB exported, 2 GiB for logs."""
    config = small("checkpoint.save_total_limit=2", "checkpoint.save_steps=10")
    shape = Bag(num_parameters=10**9)
    needed = 3 * 12e9 + 4e9 + 2 * GIB
    for free, status in ((needed + 1, "ok"), (needed - 1, "fail")):
        monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda path, free=free: Bag(free=free))
        finding = doctor_host._disk(config, shape)
        assert finding.status == status and (status == "ok" or "save_total_limit" in finding.fix)

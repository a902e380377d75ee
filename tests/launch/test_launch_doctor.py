"""`agrpo doctor` on a real configuration, well and with several faults at once; its estimates by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Bag

import pytest

from agrpo.config import Devices, check, compose
from agrpo.launch import doctor_host, plan
from agrpo.launch.preview import GIB

ROOT = Path(__file__).parents[2]
BROKEN = """
import time


class Room:
    def reset(self, **columns):
        raise RuntimeError("no room at the inn")

    def look(self, where: str) -> str:
        '''Look.

        Args:
            where: Where to look.
        '''
        return where


def slow(completions, **columns):
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


def test_failures_come_with_their_fix_and_hide_no_other(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    arguments = ("+recipe=quickstart", f"run.output_dir={tmp_path}/run", "env.factory=broken.Room", "--no-server", "--limit", "60")
    code, answer = doctor(tmp_path, *arguments, "scorer.functions=[broken.raises]")
    rows = by_name(answer)
    assert code == 4 and not answer["ok"]
    assert rows["rewards"]["status"] == "fail" and "broken.raises" in rows["rewards"]["found"] + rows["scorer"]["found"]
    assert rows["rewards"]["fix"].startswith("a run would drop such groups")
    assert rows["environment"]["status"] == "fail" and "no room at the inn" in rows["environment"]["found"]
    assert rows["step"]["status"] == "skip" and rows["template"]["status"] in ("ok", "warn")


def test_a_part_that_hangs_ends_at_its_limit_and_the_next_goes_on(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    code, answer = doctor(
        tmp_path, "+recipe=quickstart", f"run.output_dir={tmp_path}/run", "scorer.functions=[broken.slow]",
        "scorer.timeout=null", "--no-server", "--limit", "20",
    )  # fmt: skip
    rows = by_name(answer)
    assert code == 4 and rows["scorer"]["status"] == "ok"
    assert rows["rewards"]["found"].startswith("not through within 20 s") and "--limit" in rows["rewards"]["fix"]
    assert rows["tools"]["status"] == "skip"


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

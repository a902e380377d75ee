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
from agrpo.launch import doctor as examining
from agrpo.launch import doctor_code, doctor_host, doctor_step, plan
from agrpo.launch.preview import GIB
from agrpo.launch.processes import free_ports
from agrpo.scorer.contract import ScoreError

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
    answer = json.loads(done.stdout)
    assert all(row["fix"] for row in answer["rows"] if row["status"] == "fail"), answer
    return done.returncode, answer


def by_name(answer: dict) -> dict[str, dict]:
    return {row["name"]: row for row in answer["rows"]}


def test_a_configuration_that_is_well_has_every_part_and_leaves_nothing_behind(tmp_path):
    """One of two nodes: the other is nobody's to wait for."""
    nodes = ("run.num_nodes=2", f"run.master=127.0.0.1:{free_ports(1)[0]}", "run.num_processes=1")
    code, answer = doctor(tmp_path, "+recipe=quickstart", f"run.output_dir={tmp_path}/run", "rollout.group_size=4", *nodes)
    assert code == 0 and answer["ok"], answer
    rows = by_name(answer)
    parts = "versions devices network configuration memory disk data prompt template scorer rewards tools"
    for name in [*parts.split(), "open files", "server start", "server: model", "step"]:
        assert rows[name]["status"] in ("ok", "warn", "skip"), rows[name]
    assert "correct 0.0" in rows["rewards"]["found"] and "tokens, mean" in rows["prompt"]["found"]
    assert "grad_norm" in rows["step"]["found"] and rows["step"]["seconds"] > 0
    assert rows["nodes"]["found"].startswith("the step ran on this machine alone; the 1 that join at 127.0.0.1:")
    assert not (tmp_path / "run").exists()


def test_copies_of_the_sharded_model_on_other_nodes_are_left_out(tmp_path):
    """Eight ranks on two nodes hold two copies; the four of one node can hold two as well, three ranks of one node one."""
    for num_processes, copies in ((4, 2), (3, 1)):
        nodes = ("run.num_nodes=2", "run.master=127.0.0.1:29400", f"run.num_processes={num_processes}", "+model.fsdp.options={replicate: 2}")
        tried = doctor_step._smallest(small(*nodes), tmp_path)
        assert (tried.run.num_nodes, tried.run.num_processes, tried.model.fsdp.options) == (1, num_processes, {"replicate": copies})


def test_failures_come_with_their_fix_and_a_part_that_hangs_ends_at_its_limit(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    code, answer = doctor(
        tmp_path, "+recipe=quickstart", f"run.output_dir={tmp_path}/run", "scorer.functions=[broken.raises]",
        "env.factory=broken.Slow", "--no-server", "--limit", "30",
    )  # fmt: skip
    rows = by_name(answer)
    assert code == 4 and not answer["ok"]
    assert rows["scorer"]["status"] == "ok" and rows["template"]["status"] in ("ok", "warn")
    line = BROKEN.splitlines().index('    raise KeyError("answer")') + 1
    said = f": reward function raises raised KeyError: 'answer' ({tmp_path}/broken.py, line {line})"
    assert rows["rewards"]["status"] == "fail" and rows["rewards"]["found"].endswith(said)
    assert rows["rewards"]["fix"] == "a run would drop such groups; mend the function"
    assert rows["data: heldout"]["status"] == "ok" and "rows; columns" in rows["data: heldout"]["found"]
    assert rows["tools"]["found"] == "not through within 30 s; the last it said: asking a service that never answers"
    assert "--limit" in rows["tools"]["fix"] and rows["step"]["status"] == "skip"


def test_an_environment_that_cannot_be_reset_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    asyncio.run(doctor_code._tools(small("env.factory=broken.Room"), found.append))
    assert [(f.name, f.status) for f in found] == [("environment", "fail")]
    assert "no room at the inn" in found[0].found and found[0].fix.startswith("mend the environment")


@pytest.mark.parametrize(
    ("name", "text", "found", "fix"),
    [
        ("data", "data: package `datasets` is not installed; run: pip install x", "data: package `datasets` is not installed", "pip install x"),
        ("data", "data.path: x does not exist; give a file", "data.path: x does not exist", "give a file"),
        ("configuration", "loss.beta must be at least 0, got -1", "loss.beta must be at least 0, got -1", examining.FIXES["configuration"]),
        ("rewards", "odd returned nan; see its code", "odd returned nan; see its code", examining.FIXES["rewards"]),
        ("server: reachable", "healthy, but slow", "healthy, but slow", examining.FIXES["server"]),
        ("step", "it ended", "it ended", examining.FIXES["step"]),
    ],
)
def test_a_failure_without_a_fix_of_its_own_gets_one(name, text, found, fix):
    got = examining.with_fix(doctor_host.Finding(name, "fail", text))
    assert (got.found, got.fix) == (found, fix)


def test_a_part_whose_process_dies_names_its_log(tmp_path):
    (finding,) = examining._part("data", tmp_path, 60)  # a folder without a configuration
    assert finding.status == "fail" and finding.fix == f"read its log, {tmp_path}/data.log"


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


@pytest.mark.parametrize(
    ("reason", "todo"), [("raised", "mend the function"), ("timeout", "raise scorer.timeout"), ("died", "dmesg"), ("other", "mend")]
)
def test_a_group_that_was_not_scored_has_the_fix_of_its_reason(reason, todo):
    async def score(group):
        raise ScoreError(reason, "reward function right failed")

    async def close():
        pass

    async def opened(columns):
        return Bag(names=["right"], score=score, close=close)

    found = []
    asyncio.run(
        doctor_code._rewards(Bag(open=opened), Bag(), [Bag(row_index=7)], lambda text, **_: {"input_ids": [1]}, ": held", found.append)
    )
    assert [(f.name, f.status) for f in found] == [("scorer: held", "ok"), ("rewards: held", "fail")]
    assert todo in found[1].fix and ("scorer.timeout" in found[1].fix) == (reason == "timeout")


@pytest.mark.parametrize(
    ("overrides", "lengths", "status"),
    [
        ([], [10, 90], "ok"), ([], [10, 91], "warn"), ([], [10, 120], "warn"), ([], [120, 130], "fail"),
        (["rollout.on_long_prompt=abort"], [10, 119], "warn"), (["rollout.on_long_prompt=abort"], [10, 120], "fail"),
    ],
)  # fmt: skip
def test_prompts_that_a_run_skips_do_not_end_it(overrides, lengths, status):
    config = small("server.max_model_len=120", "sampler.max_completion_length=30", "packer.token_budget=null", *overrides)
    assert doctor_code._room(config, lengths, "").status == status


def test_ranks_that_share_a_memory_are_not_told_to_become_more(monkeypatch):
    monkeypatch.setattr(doctor_host, "free_memory", lambda: 2**20)
    for num, words in ((1, "an adapter"), (2, "fewer ranks (run.num_processes), an adapter")):
        finding = doctor_host._memory(small(f"run.num_processes={num}"), doctor_host.shape_of(small().model.path))
        assert finding.status == "fail" and finding.fix.startswith(words) and "GiB for all ranks and the server's weights" in finding.found


def test_a_reward_of_none_for_every_answer_is_a_warning():
    def scored(*values):
        rollouts = tuple(Bag(rewards={"right": 1.0, "style": value}) for value in values)
        return doctor_code._scored(Bag(row_index=7), Bag(rollouts=rollouts), 0.1)

    assert scored(None, 0.5).status == "ok"
    silent = scored(None, None)
    assert silent.status == "warn" and "if style gives it to every answer" in silent.fix

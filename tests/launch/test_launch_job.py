"""What a plan without GPU says, and the value that a sweep compares: the last finite number of a metric."""

import json

import pytest

from agrpo.config import compose
from agrpo.config.devices import Devices, Gpu, assumed
from agrpo.config.runner import Job, NeedsAssumedDevices
from agrpo.errors import AgrpoError
from agrpo.launch.job import ON_CPU, objective, start

ELSEWHERE = ["+recipe=quickstart", "server=external", "server.base_url=http://node7:8000", "sync=gloo"]


def plan(tmp_path, capsys, *overrides, devices=Devices()):
    tree = compose([*ELSEWHERE, f"run.output_dir={tmp_path / 'run'}", *overrides])
    start(Job(tree, [], devices, dry_run=True, multirun=False, number=None))
    return capsys.readouterr().out


def test_a_server_elsewhere_and_no_gpu_here_is_planned_for_the_cpu_and_says_so(tmp_path, capsys):
    # The recipe asks for the CPU; without that the trainer is there for want of a GPU.
    text = plan(tmp_path, capsys)
    assert ON_CPU not in text and "0.82 million parameters" in text and "3.1 MiB weights" in text
    text = plan(tmp_path, capsys, "run.use_cpu=false")
    assert ON_CPU in text and "trainer0  on cpu" in text
    one = Devices((Gpu("0", "test GPU", 81920, 9.0),))
    assert ON_CPU not in plan(tmp_path, capsys, "run.use_cpu=false", devices=one)
    named = ["run.use_cpu=false", "run.devices={trainer: [0, 1]}"]  # as the line says
    with pytest.raises(NeedsAssumedDevices):
        plan(tmp_path, capsys, *named)
    text = plan(tmp_path, capsys, *named, devices=assumed({"run": {"devices": {"trainer": [0, 1]}}}))
    assert "trainer1  on GPU 1 (assumed GPU)" in text and "planned for 2 GPUs of 80 GiB: this machine has none" in text


def test_the_objective_is_the_last_finite_number_or_one_line(tmp_path):
    records = [
        {"step": 1, "reward": 0.25, "diag/bottleneck": "balanced"}, {"step": 2, "reward": 0.5, "loss": None},
        {"step": 3, "reward": None},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 4, "rew')
    assert objective("reward", tmp_path) == 0.5
    for name, text in {
        "loss": "run.objective: loss was never a finite number; it was last logged as None",
        "diag/bottleneck": "run.objective: diag/bottleneck was never a finite number; it was last logged as 'balanced'",
        "rewards": "run.objective: no metric rewards was logged; logged: diag/bottleneck, loss, reward, step",
    }.items():
        with pytest.raises(AgrpoError) as error:
            objective(name, tmp_path)
        assert str(error.value) == text
    with pytest.raises(AgrpoError, match="no metric reward was logged; logged: nothing"):
        objective("reward", tmp_path / "none")

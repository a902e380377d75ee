"""The value that a sweep compares: the last finite number of a metric, whatever else the file holds."""

import json

import pytest

from agrpo.errors import AgrpoError
from agrpo.launch.job import objective


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

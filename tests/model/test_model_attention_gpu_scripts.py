"""The GPU scripts at their smallest size on a CPU: every part runs, and one that fails hides nothing."""

import importlib.util
import json

import pytest

from tests.gpu import bench
from tests.gpu.parts import run_parts


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the head's part interprets Triton")
def test_the_tiny_bench_runs_every_part(capfd):
    assert bench.main(["--tiny"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    checked = {row["backend"]: row for row in rows if row.get("part") == "check" and row["dtype"] == "torch.float32"}
    assert checked["torch"]["ok"] is checked["sdpa"]["ok"] is True
    assert checked["varlen"]["cases"] == 0
    packings = {row["packing"]: row["packing_ratio"] for row in rows if row.get("part") == "step_tiny" and "packing" in row}
    assert packings == {"sequence": 1.0, "tree": 3.38}
    assert {row["part"] for row in rows if "part" in row} == {"facts", "check", "step_tiny", "attention", "head"}


def test_a_part_that_fails_is_named_and_the_next_one_runs(capsys):
    def broken():
        yield {"value": 1}
        raise ValueError("no such kernel\nsecond line")

    assert run_parts({"first": broken, "second": lambda: [{"value": 2}]}, budget_s=60.0) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["part"], row.get("error") or row["value"]) for row in rows] == [
        ("first", 1),
        ("first", "ValueError: no such kernel"),
        ("second", 2),
    ]


def test_without_time_left_the_parts_not_run_are_listed(capsys):
    assert run_parts({"first": lambda: [{"value": 1}, {"value": 2}], "second": lambda: [{}]}, budget_s=-1.0) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("value") for row in rows] == [1, None]
    assert rows[1]["not_run"] == ["second"]

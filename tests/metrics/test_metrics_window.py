"""Reductions of a window against numbers worked out by hand (LOG-2 to LOG-5), and the declared names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import agrpo
from agrpo.metrics.diagnose import verdicts
from agrpo.metrics.names import REDUCTIONS, declared, metrics, reduction_of, table_markdown, undeclared
from agrpo.metrics.window import Window


def make_window() -> Window:
    """Two groups of a made-up window: 3 rollouts with rewards 1, 0, 1 and 5 rollouts with 0, 0, 1, 0, 0."""
    window = Window(strict=True)
    window.add("reward", 2.0, 3)
    window.add("reward", 1.0, 5)
    window.add("completions/max_length", 41)
    window.add("completions/max_length", 37)
    window.add("completions/min_length", 7)
    window.add("completions/min_length", 11)
    window.add("sample/dropped_stale_count", 2)
    window.add("sample/dropped_stale_count", 3)
    window.add("perf/step_s", 1.0)
    window.add("perf/step_s", 4.0)
    window.add("num_tokens", 700)
    window.add("num_tokens", 1300)
    return window


EXPECTED = {
    "reward": 3 / 8,  # not the mean of 2/3 and 1/5
    "completions/max_length": 41,
    "completions/min_length": 7,
    "sample/dropped_stale_count": 5,
    "perf/step_s": 2.5,
    "num_tokens": 1300,
}


def test_each_reduction_gives_the_number_worked_out_by_hand():
    assert make_window().record(12) == pytest.approx({"step": 12, **EXPECTED})


def test_record_empties_the_window_and_keeps_the_order_of_the_table():
    window = make_window()
    names = list(window.record(1))
    places = [[m.name for m in metrics()].index(name) for name in names[1:]]
    assert names[0] == "step" and places == sorted(places)
    assert window.record(2) == {"step": 2} and len(window) == 0


def test_windows_of_two_processes_merge_to_the_window_of_one():
    one, other, together = Window(), Window(), Window()
    for i, (name, value, weight) in enumerate(
        [
            ("reward", 2.0, 3),
            ("reward", 1.0, 5),
            ("entropy", 0.5, 7),
            ("entropy", 3.5, 1),
            ("sampling/masked_mean", 2, 11),
            ("completions/max_length", 3, 1),
            ("completions/max_length", 5, 1),
            ("rollout/failed_count", 2, 1),
        ]
    ):
        (one if i % 2 else other).add(name, value, weight)
        together.add(name, value, weight)
    one.merge(json.loads(json.dumps(other.to_wire())))
    assert len(other) == 0
    assert one.record(3) == together.record(3)
    together.add("reward", 1, 2)
    assert Window.from_wire(together.to_wire()).record(1) == {"step": 1, "reward": 0.5}


def test_not_a_number_is_no_event():
    window = Window()
    window.add("reward", math.nan, 3)
    window.add("completions/max_length", math.nan)
    window.add("completions/min_length", 5)
    window.add("completions/min_length", math.nan)
    assert window.record(1) == {"step": 1, "completions/min_length": 5}


def test_nothing_to_divide_by_is_left_out_except_where_the_table_says_nan():
    window = Window()
    window.add("clip_ratio/low_mean", 0, 0)
    window.add("tools/failure_frequency", 0, 0)
    record = window.record(1)
    assert list(record) == ["step", "tools/failure_frequency"] and math.isnan(record["tools/failure_frequency"])


def test_name_of_a_reward_function_does_not_change_its_reduction():
    assert reduction_of("rewards/max_len/mean") == "ratio"
    assert declared("rewards/max_len/mean").name == "rewards/{name}/mean"
    assert declared("tools/add/call_count").reduction == "sum" and declared("group/loss_weight_size_7") is not None


def test_undeclared_names_follow_their_last_word_and_are_refused_where_strict():
    window = Window()
    for value in (3, 5):
        for name in ("mine/hit_count", "mine/max_depth", "mine/min_depth", "max/depth", "counter"):
            window.add(name, value)
    assert window.record(1) == {
        "step": 1,
        "counter": 4,
        "max/depth": 4,
        "mine/hit_count": 8,
        "mine/max_depth": 5,
        "mine/min_depth": 3,
    }
    assert undeclared(["step", "reward", "mine/hit_count", "eval/heldout/reward"]) == ["mine/hit_count"]
    with pytest.raises(ValueError, match="mine/hit_count is not declared"):
        Window(strict=True).add("mine/hit_count", 1)


def test_table_is_complete_and_well_formed():
    names = [m.name for m in metrics()]
    assert len(names) == len(set(names)) >= 113
    assert {m.reduction for m in metrics()} <= set(REDUCTIONS) and {m.by for m in metrics()} <= set("WFLT")
    assert all(m.unit and m.meaning and m.section for m in metrics())
    assert sum(line.startswith("| `") for line in table_markdown().splitlines()) == len(names)


@pytest.mark.parametrize(
    ("wait_s", "backpressure_s", "bottleneck"),
    [
        (0.11, 0.0, "generation-bound"),
        (0.0, 0.5, "trainer-bound"),
        (0.3, 0.5, "window-bound"),
        (0.09, 0.08, "balanced"),
    ],
)
def test_bottleneck_is_read_from_waits_of_a_tenth_of_the_step(wait_s, backpressure_s, bottleneck):
    window = Window()
    for _ in range(3):
        window.add("perf/step_s", 1.0)
        window.add("perf/rollout_wait_s", wait_s)
        window.add("rollout/backpressure_s", backpressure_s / 2, 1)
        window.add("rollout/backpressure_s", backpressure_s / 2, 1)
    assert verdicts(window, 3, 64)["diag/bottleneck"] == bottleneck


@pytest.mark.parametrize(
    ("concurrency", "cap", "usage", "wait_s", "backpressure_s", "limit"),
    [
        (64, 64, 0.3, 0.5, 0.0, "max_concurrent_rollouts"),
        (64, 64, 0.7, 0.5, 0.0, "none"),
        (64, 64, 0.3, 0.0, 0.0, "none"),
        (31, 32, 0.9, 0.5, 0.0, "server"),
        (20, 32, 0.9, 0.5, 0.0, "none"),
        (64, 64, 0.3, 0.5, 0.2, "staleness"),
    ],
)
def test_concurrency_limit_is_named(concurrency, cap, usage, wait_s, backpressure_s, limit):
    window = Window()
    for name, value in (
        ("perf/step_s", 1.0),
        ("perf/rollout_wait_s", wait_s),
        ("rollout/backpressure_s", backpressure_s),
        ("rollout/concurrency", concurrency),
        ("rollout/concurrency_cap", cap),
        ("rollout/vllm_kv_cache_usage_frac", usage),
    ):
        window.add(name, value)
    assert verdicts(window, 1, 64)["diag/concurrency_limit"] == limit


def test_window_without_a_step_has_no_verdict():
    assert verdicts(Window(), 1, 64) == {}


def test_every_name_the_code_measures_is_declared():
    source = Path(agrpo.__file__).parent
    found = {
        (path.name, re.sub(r"\{[^}]*\}", "x", name))
        for path in source.rglob("*.py")
        for name in re.findall(r'(?:window|metrics|_window)\.add\(\s*f?"([^"]+)"', path.read_text())
    }
    # `completions/mean_{kind}length` has an empty or a worded kind; evaluations name their own figures.
    names = {(file, name.replace("_xlength", "_length")) for file, name in found if name != "eval/x/x"}
    assert len(names) > 50
    assert [(file, name) for file, name in sorted(names) if declared(name) is None] == []

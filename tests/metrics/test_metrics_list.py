"""Every required metric is declared with its unit, owner and reduction, and reduced as it says."""

from __future__ import annotations

import pytest

from agrpo.metrics.names import metrics
from agrpo.metrics.window import Window
from tests import metric_list

# Two events of a window, value and weight, and what each reduction makes of them.
EVENTS = ((3.0, 4.0), (5.0, 12.0))
REDUCED = {"ratio": 0.5, "mean": 4.0, "sum": 8.0, "max": 5.0, "min": 3.0, "last": 5.0}


def test_every_required_metric_is_declared_as_required():
    declared = {m.name: (m.unit, m.by, m.reduction) for m in metrics()}
    required = metric_list.required()
    assert len(required) >= 128
    assert {name: declared.get(name) for name in required} == required


@pytest.mark.parametrize("metric", metrics(), ids=lambda m: m.name)
def test_a_window_reduces_each_metric_by_its_rule(metric):
    name = metric.name.format(name="max_len", tool="count_min", reason="max_count", N=7, k=3)
    window = Window(strict=True)
    for value, weight in EVENTS:
        window.add(name, value, *([weight] if metric.reduction == "ratio" else []))
    assert window.record(1) == {"step": 1, name: REDUCED[metric.reduction]}


def test_a_run_that_logs_too_little_or_nonsense_is_found_out():
    records = [{"step": 1, "reward": 0.5, "entropy": 0.1}, {"step": 2, "completions/clipped_ratio": 1.5, "num_tokens": 2.5}]
    gone = metric_list.absent(records)
    assert "reward" not in gone and "loss" in gone and "tools/latency_s" not in gone
    assert "tools/latency_s" in metric_list.absent(records, "tools")
    assert metric_list.outside(records) == [(2, "completions/clipped_ratio", 1.5), (2, "num_tokens", 2.5)]

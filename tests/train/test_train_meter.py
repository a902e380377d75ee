"""Rates of a window from hand-made steps, and peaks by the names that drivers report."""

import dataclasses

import numpy as np
import pytest
import torch

from agrpo.metrics.window import Window
from agrpo.model.terms import sequence_row
from agrpo.packer.flops import Flops, Training
from agrpo.train.meter import Meter, peak_flops, peak_of
from agrpo.types import Microbatch, Step


def test_rates_by_hand():
    """Two rows of 3 tokens with 2 terms: 3 * (10 * 3 + 100 * 2 + 1 * (1 + 2 + 3)) = 708 each; head and decoder again."""
    row = dataclasses.replace(sequence_row(np.arange(3)))
    step = Step(1, (Microbatch((row, row)),))
    meter, window = Meter(Training(Flops(10.0, 100.0, 1.0), is_recomputed=True), 2, 1000.0), Window(strict=True)
    meter.add(step)
    meter.record(window, fwd_bwd_s=2.0, step_s=4.0)
    assert window.get("perf/fwd_bwd_mfu") == pytest.approx(1416 / 4000)
    assert window.get("perf/wall_clock_mfu") == pytest.approx(1416 / 8000)
    assert window.get("perf/fwd_bwd_hfu") == pytest.approx(1888 / 4000)
    assert window.get("perf/model_tflops_per_s") == pytest.approx(708e-12)
    window.record(1)
    meter.record(window, 2.0, 4.0)
    assert not len(window)


def test_without_a_known_peak_or_architecture_there_is_no_share():
    step, window = Step(1, (Microbatch((sequence_row(np.arange(3)),)),)), Window(strict=True)
    for training, names in ((None, set()), (Training(Flops(10.0, 100.0, 1.0)), {"step", "perf/model_tflops_per_s"})):
        meter = Meter(training, 1, None)
        meter.add(step)
        meter.record(window, 1.0, 1.0)
        assert set(window.record(1)) | {"step"} == names | {"step"}
    assert peak_of(torch.device("cpu"), "bf16", torch.float32) is None


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA GeForce RTX 4090", "fp16", 165e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307e12),
        ("Some future device", "bf16", None),
    ],
)
def test_peaks(name, precision, expected):
    assert peak_flops(name, precision) == expected

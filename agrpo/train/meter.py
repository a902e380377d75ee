"""How much of the devices' arithmetic a run uses: model FLOPs over seconds times peak (MET-perf/fwd_bwd_mfu)."""

from __future__ import annotations

from typing import Any

import torch

from agrpo.metrics.window import Window
from agrpo.packer.flops import Flops, Training
from agrpo.types import Step

# Dense matrix products with float32 accumulation, tera operations per second, from the vendors' data sheets: by the
# words of the device's name, the longest first. float32 is without TF32.
PEAKS = {
    "H100 PCIe": {"bf16": 756, "fp16": 756, "fp32": 51},
    "H100 NVL": {"bf16": 835, "fp16": 835, "fp32": 60},
    "GH200": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H200": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H100": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H800": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H20": {"bf16": 148, "fp16": 148, "fp32": 44},
    "B200": {"bf16": 2250, "fp16": 2250, "fp32": 75},
    "A100": {"bf16": 312, "fp16": 312, "fp32": 19.5},
    "A800": {"bf16": 312, "fp16": 312, "fp32": 19.5},
    "A10": {"bf16": 125, "fp16": 125, "fp32": 31.2},
    "A40": {"bf16": 150, "fp16": 150, "fp32": 37.4},
    "L40S": {"bf16": 362, "fp16": 362, "fp32": 91.6},
    "L40": {"bf16": 181, "fp16": 181, "fp32": 90.5},
    "L4": {"bf16": 121, "fp16": 121, "fp32": 30.3},
    "V100": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
    "RTX 4090": {"bf16": 165, "fp16": 165, "fp32": 82.6},
    "RTX 3090": {"bf16": 71, "fp16": 71, "fp32": 35.6},
    "MI325X": {"bf16": 1307, "fp16": 1307, "fp32": 163},
    "MI300X": {"bf16": 1307, "fp16": 1307, "fp32": 163},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations per second of one device at `bf16`, `fp16` or `fp32`; None where unknown."""
    words = set(device_name.replace("-", " ").split())
    name = next((n for n in sorted(PEAKS, key=len, reverse=True) if words.issuperset(n.split())), None)
    rate = PEAKS.get(name, {}).get(precision)
    return None if rate is None else rate * 1e12


def peak_of(device: torch.device, precision: str, weights: torch.dtype) -> float | None:
    """Of the device a rank trains on; `precision` is `model.precision`, `no` = that of the weights. CPUs have none."""
    if device.type != "cuda":
        return None
    of_weights = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(weights, "fp32")
    kind = of_weights if precision == "no" else precision
    if kind == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        return None
    return peak_flops(torch.cuda.get_device_name(device), kind)


def open_meter(section: Any, model: torch.nn.Module, device: torch.device, num_devices: int) -> Meter:
    """The meter of a run with this `model` section."""
    flops = Flops.of_config(model.config)
    training = None if flops is None else Training(flops, section.lora.enabled, section.gradient_checkpointing)
    weights = next(model.parameters()).dtype
    return Meter(training, num_devices, peak_of(device, section.precision, weights))


class Meter:
    """Sums the operations of the steps of a window; without a known architecture it records nothing."""

    def __init__(self, training: Training | None, num_devices: int, peak: float | None):
        self._training, self._capacity = training, None if peak is None else num_devices * peak
        self._model = self._executed = 0.0

    def add(self, step: Step) -> None:
        if self._training is None:
            return
        for row in (row for microbatch in step.microbatches for row in microbatch.rows):
            self._model += self._training.of(row)
            self._executed += self._training.executed(row)

    def record(self, window: Window, fwd_bwd_s: float, step_s: float) -> None:
        """Add the rates to `window` and start again."""
        model, executed = self._model, self._executed
        self._model = self._executed = 0.0
        if not model:
            return
        window.add("perf/model_tflops_per_s", model / 1e12, fwd_bwd_s)
        if self._capacity is not None:
            window.add("perf/fwd_bwd_mfu", model, fwd_bwd_s * self._capacity)
            window.add("perf/wall_clock_mfu", model, step_s * self._capacity)
            window.add("perf/fwd_bwd_hfu", executed, fwd_bwd_s * self._capacity)

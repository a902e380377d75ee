"""The head by slices of the vocabulary against plain logits that are kept: hidden 1,024, vocabulary 151,936, float32.

`head_time`    processor time of forward and backward at 4,096 terms and 8 head ids each, one thread, one after the other
`head_memory`  highest memory above inputs and gradients / the float32 logits
`head_error`   of log-probs, entropy and gradients at as many terms against float64, relative to the largest value of each;
               the reference is made slice by slice of the terms, its weight's gradient added up
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.bench.head_child import VOCABULARY, fused, inputs, plain, total, weighed

TERMS, SLICE, LIMIT_S = 4096, 128, 900


def run() -> list[dict[str, Any]]:
    """Three bars; about six minutes of one processor and 8 GB for the plain head."""
    theirs, ours = (measure(sys.executable, kind, TERMS) for kind in ("plain", "fused"))
    ratio, memory = ours["cpu_s"] / theirs["cpu_s"], ours["extra_bytes"] / (4 * TERMS * VOCABULARY)
    error = error_at(TERMS)
    return [
        {"bar": "head_time", "value": round(ratio, 3), "unit": "x plain head", "limit": 1.2, "ok": ratio <= 1.2},
        {"bar": "head_memory", "value": round(memory, 4), "unit": "x logits", "limit": 0.125, "ok": memory <= 0.125},
        {"bar": "head_error", "value": float(f"{error:.2g}"), "unit": "", "limit": 1e-5, "ok": error <= 1e-5},
    ]


def measure(python: str, kind: str, terms: int) -> dict[str, float]:
    """What `head_child.py` prints."""
    script = Path(__file__).with_name("head_child.py")
    command = [python, "-W", "ignore", str(script), kind, str(terms)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def error_at(terms: int) -> float:
    """The largest relative error of all that the head gives at so many terms."""
    single = inputs(terms)
    outputs = fused(*single)
    total(*outputs).backward()
    ours = [*(x.detach() for x in outputs), single[0].grad, single[1].grad]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, _reference(single), strict=True))


def _reference(single: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The plain head in float64: log-probs, those of the head ids, entropy, gradients of hidden states and weight."""
    hidden, weight, targets, heads = single
    double, parts = weight.detach().double().requires_grad_(), []
    of_targets, of_heads = weighed(*heads.shape, torch.float64)
    for first in range(0, len(targets), SLICE):
        part = slice(first, first + SLICE)
        leaf = hidden[part].detach().double().requires_grad_()
        outputs = plain(leaf, double, targets[part], heads[part])
        ((of_targets[part] * outputs[0]).sum() + (of_heads[part] * outputs[1]).sum()).backward()
        parts.append([*(x.detach() for x in outputs), leaf.grad])
    return [*(torch.cat(found) for found in zip(*parts, strict=True)), double.grad]

"""The head by slices of the vocabulary against plain logits that are kept: hidden 1,024, vocabulary 151,936, float32.

`head_time`    processor time of forward and backward at 4,096 terms and 8 head ids each, one thread, one after the other
`head_memory`  highest memory above inputs and gradients / the float32 logits
`head_error`   of log-probs and gradients at 128 terms against float64, relative to the largest value of each
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.head_child import VOCABULARY, fused, inputs, plain, total

TERMS, ERROR_TERMS, LIMIT_S = 4096, 128, 900


def run() -> list[dict[str, Any]]:
    """Three bars; about three minutes of one processor and 8 GB for the plain head."""
    theirs, ours = (measure(sys.executable, kind, TERMS) for kind in ("plain", "fused"))
    ratio, memory = ours["cpu_s"] / theirs["cpu_s"], ours["extra_bytes"] / (4 * TERMS * VOCABULARY)
    error = _error()
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


def _error() -> float:
    single = inputs(ERROR_TERMS)
    double = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in single)
    results = []
    for head, given in ((fused, single), (plain, double)):
        outputs = head(*given)
        total(*outputs).backward()
        results.append([*(x.detach() for x in outputs), given[0].grad, given[1].grad])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))

"""Our head against TRL 1.16's chunked one: log-prob and entropy of 4,096 terms, forward and backward, in turns in one run.

Sizes of `tests/bench/head.py`, without head ids, which TRL's does not give. Processor time of one thread, the best of
each. TRL is installed from the registry into an environment of its own, as for `rollout_trl`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any

from tests.bench.head import measure
from tests.bench.rollout_trl import open_environment

TERMS, ROUNDS, LIMIT = 4096, 2, 1.0


def run() -> list[dict[str, Any]]:
    """Two bars; about six minutes of one processor and an installation."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            python = open_environment(folder)
        except (subprocess.SubprocessError, OSError) as error:
            detail = getattr(error, "stderr", None) or str(error)
            text = f"TRL could not be installed: {detail.strip().splitlines()[-1]}"
            return [{"bar": "head_trl", "value": None, "unit": "x", "limit": LIMIT, "ok": None, "reason": text}]
        ours, theirs = [], []
        for _ in range(ROUNDS):
            theirs.append(measure(python, "trl", TERMS))
            ours.append(measure(sys.executable, "fused without heads", TERMS))
    ratio = min(x["cpu_s"] for x in ours) / min(x["cpu_s"] for x in theirs)
    memory = ours[0]["extra_bytes"] / theirs[0]["extra_bytes"]
    return [
        {"bar": "head_trl", "value": round(ratio, 3), "unit": "x TRL's time", "limit": LIMIT, "ok": ratio <= LIMIT},
        {"bar": "head_trl_memory", "value": round(memory, 3), "unit": "x TRL's", "limit": LIMIT, "ok": memory <= LIMIT},
    ]

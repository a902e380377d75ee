"""Our head against TRL 1.16's chunked one: log-prob and entropy of 2,048 terms, forward and backward, in one run.

Hidden size and vocabulary of `tests/bench/head.py`, no head ids, which TRL's does not give. Processor time of one thread.
TRL is installed from the registry into an environment of its own, as for `rollout_trl`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any

from tests.bench.head import measure
from tests.bench.rollout_trl import not_installed, open_environment

TERMS, LIMIT = 2048, 1.0


def run() -> list[dict[str, Any]]:
    """Two bars; about two minutes of one processor and an installation."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            python = open_environment(folder)
        except (subprocess.SubprocessError, OSError) as error:
            return not_installed("head_trl", LIMIT, error)
        theirs = measure(python, "trl", TERMS)
    ours = measure(sys.executable, "fused without heads", TERMS)
    ratio, memory = (ours[name] / theirs[name] for name in ("cpu_s", "extra_bytes"))
    return [
        {"bar": "head_trl", "value": round(ratio, 3), "unit": "x TRL's time", "limit": LIMIT, "ok": ratio <= LIMIT},
        {"bar": "head_trl_memory", "value": round(memory, 3), "unit": "x TRL's", "limit": LIMIT, "ok": memory <= LIMIT},
    ]

"""`agrpo train +recipe=deepmath --dry-run`: seconds for the whole plan, without loading torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

from tests.bench.help import loaded

LIMIT_S = 5.0
RUNS = 3


def run() -> list[dict]:
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", "+recipe=deepmath", f"run.output_dir={folder}/run", "--dry-run"]
        for _ in range(RUNS):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "agrpo", *arguments], check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
        heavy = loaded(arguments, ("torch", "transformers", "vllm"))
    value = statistics.median(seconds)
    return [
        {"bar": "dry_run", "value": round(value, 2), "unit": "s", "limit": LIMIT_S, "ok": value <= LIMIT_S},
        {"bar": "dry_run_heavy_imports", "value": len(heavy), "unit": "modules", "limit": 0, "ok": not heavy},
    ]

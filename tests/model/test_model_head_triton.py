"""The Triton kernels in Triton's interpreter on a processor, against the torch operations they stand for."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_the_kernels_equal_the_torch_operations():
    # Triton decides at its import whether it interprets, hence a process of its own.
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.head"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and len(rows) == 3 and all(row["ok"] for row in rows), rows

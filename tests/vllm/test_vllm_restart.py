"""kill -9 of a managed vLLM while a run goes on, once its front end and once its engine."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.test_restart import Run, assert_went_on

pytestmark = pytest.mark.vllm


def kill(folder: Path, kind: str) -> None:
    """SIGKILL to the process of this run's vLLM that is of this kind: front end, or engine, which is its child."""
    model = str(folder / "model")
    (front,) = [p for p in psutil.process_iter() if _is_front(p, model)]
    victim = front
    if kind == "engine":
        (victim,) = [p for p in front.children() if "EngineCore" in " ".join(p.cmdline()) + p.name()]
    os.kill(victim.pid, signal.SIGKILL)


def _is_front(process: psutil.Process, model: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "vllm.entrypoints.openai.api_server" in words and model in words and not any("leash.py" in w for w in words)


def test_a_vllm_killed_twice(tmp_path, vllm_python):
    run = Run(
        tmp_path, "server=vllm", f"server.python={vllm_python}", "run.max_steps=24", "model.dtype=float32",
        "optimizer.learning_rate=3e-4",
    )  # fmt: skip
    for count, kind in ((1, "front end"), (2, "engine")):
        run.await_step(4 if count == 1 else 12)
        kill(tmp_path, kind)
        run.await_line("has the weights of version", count)
    records = assert_went_on(run, 24, 2, limit_s=300, tolerance=1e-3)
    print([r["perf/weight_sync_parity"] for r in records if "perf/weight_sync_parity" in r])
    assert "restarting (2 of 5)" in "".join(run.lines)

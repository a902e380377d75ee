"""Our rollout process and TRL's rollout loop against the same server without latency, in turns in one run.

Both ask for the log-prob of the sampled token only, which is all TRL's loop can, with 64 requests at once, groups of 8, the
same answers, an equally trivial tokenizer and reward, and are measured in CPU time of their process up to the encoded
sample. TRL is installed from the registry into an environment of its own, which sees the torch and transformers of this
one; AGRPO_BENCH_VENVS is a folder that keeps it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.rollout import produce
from tests.stub_server import stub_server

TRL, TOKENS, GROUPS, ROUNDS, LIMIT = "trl>=1.16,<1.17", 512, 32, 3, 5.0
INSTALL_LIMIT_S, RUN_LIMIT_S = 600, 300


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, stub_server(tokens=TOKENS, heads=0, bodies=16) as url:
        try:
            python = open_environment(folder)
        except (subprocess.SubprocessError, OSError) as error:
            return not_installed("rollout_trl", LIMIT, error)
        asyncio.run(produce(url, 8, heads=0))  # connections, imports and caches
        ours, theirs = [], []
        for _ in range(ROUNDS):
            tokens, cpu_s, _ = asyncio.run(produce(url, GROUPS, heads=0))
            ours.append(tokens / cpu_s)
            theirs.append(_theirs(python, url))
    ours, theirs = sorted(ours)[ROUNDS // 2], sorted(theirs)[ROUNDS // 2]
    unit, ratio = "tokens/s/core", round(ours / theirs, 2)
    return [
        {"bar": "rollout_trl_agrpo", "value": round(ours), "unit": unit, "limit": None, "ok": True},
        {"bar": "rollout_trl_trl", "value": round(theirs), "unit": unit, "limit": None, "ok": True},
        {"bar": "rollout_trl", "value": ratio, "unit": "x", "limit": LIMIT, "ok": ratio >= LIMIT},
    ]


def not_installed(bar: str, limit: float, error: Exception) -> list[dict[str, Any]]:
    """A comparison with TRL that could not be made, neither met nor missed."""
    detail = getattr(error, "stderr", None) or str(error)
    text = f"TRL could not be installed: {detail.strip().splitlines()[-1]}"
    return [{"bar": bar, "value": None, "unit": "x", "limit": limit, "ok": None, "reason": text}]


def open_environment(kept: str) -> str:
    """The interpreter of the environment with TRL in `kept`, or where AGRPO_BENCH_VENVS says; made if it is not there."""
    folder = Path(os.environ.get("AGRPO_BENCH_VENVS") or kept) / "trl-1.16"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run(
            [sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, text=True, timeout=120
        )
        site = next((folder / "lib").glob("python*/site-packages"))
        # What this environment has is found there too, so that torch is not fetched again.
        (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        command = [str(python), "-m", "pip", "install", "--quiet", TRL, "aiohttp", "jinja2"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        (folder / "made").touch()
    return str(python)


def _theirs(python: str, url: str) -> float:
    """Tokens per CPU second of TRL's loop, in a process of its own."""
    script = Path(__file__).with_name("trl_loop.py")
    result = subprocess.run(
        [python, str(script), url, str(GROUPS), str(TOKENS)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_LIMIT_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(result.stdout.splitlines()[-1])["tokens_per_s"]

"""`agrpo --help`: seconds from the shell to the prompt, and whether torch or hydra was loaded for it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

LIMIT_S = 0.7
RUNS = 5


def run() -> list[dict]:
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "agrpo", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    value = statistics.median(seconds)
    heavy = loaded(["--help"])
    return [
        {"bar": "help", "value": round(value, 3), "unit": "s", "limit": LIMIT_S, "ok": value <= LIMIT_S},
        {"bar": "help_heavy_imports", "value": len(heavy), "unit": "modules", "limit": 0, "ok": not heavy},
    ]


def loaded(arguments: list[str], modules: tuple[str, ...] = ("torch", "hydra", "transformers", "vllm")) -> list[str]:
    """Which of `modules` one call of the command line loads."""
    code = (
        "import sys\nfrom agrpo.cli import app\n"
        f"try: app({arguments!r}, prog_name='agrpo')\nexcept SystemExit: pass\n"
        f"print('loaded', *[m for m in {modules!r} if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return output.splitlines()[-1].split()[1:]

"""`python -m agrpo.metrics.picture RUN FILE.svg [STEP]`: the live console of a run at one of its steps, as a picture."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import yaml
from rich.console import Console as RichConsole

from agrpo.metrics.console import Console
from agrpo.metrics.sinks import read_records

WIDTH, HEIGHT = 80, 28


def draw(run_dir: Path, path: Path, step: int | None = None) -> None:
    """Records up to `step`, by default to two thirds of the run; the elapsed time is that of its steps."""
    records = read_records(run_dir)
    step = step or round(records[-1]["step"] * 2 / 3)
    shown = [record for record in records if record["step"] <= step]
    config = yaml.safe_load((Path(run_dir) / "config.yaml").read_text())
    output = RichConsole(file=io.StringIO(), record=True, width=WIDTH, height=HEIGHT, force_terminal=True)
    console = Console(run_dir, max_steps=config["run"]["max_steps"], output=output)
    for record in shown:
        console.step(record)
    console._began = time.monotonic() - sum(record.get("perf/step_s", 0.0) for record in shown)
    output.print(console.render())
    output.save_svg(str(path), title="agrpo train")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)

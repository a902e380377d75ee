"""`python -m agrpo.metrics.picture RUN FILE.svg [STEP|end]`: the live console of a run at a step, or its end, as a picture."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console as RichConsole
from rich.text import Text

from agrpo.metrics.console import Console
from agrpo.metrics.findings import closing
from agrpo.metrics.sinks import read_records
from agrpo.metrics.summary import read_summary, written

WIDTH, HEIGHT = 80, 28


def draw(run_dir: Path, path: Path, step: int | None = None) -> None:
    """Records up to `step`, by default to two thirds of the run; the elapsed time is that of its steps."""
    records = read_records(run_dir)
    step = step or round(records[-1]["step"] * 2 / 3)
    console = _console(run_dir, [record for record in records if record["step"] <= step])
    console.output.print(console.render())
    console.output.save_svg(str(path), title="agrpo train")


def draw_end(run_dir: Path, path: Path) -> None:
    """What is printed when the run has finished."""
    console = _console(run_dir, read_records(run_dir))
    console.finish(read_summary(run_dir), written(run_dir), verdicts=closing(run_dir))
    lines = Text.from_ansi(console.output.file.getvalue())  # long lines are broken as a terminal breaks them
    output = RichConsole(file=io.StringIO(), record=True, width=WIDTH)
    output.print(lines)
    output.save_svg(str(path), title="agrpo train")


def _console(run_dir: Path, records: list[dict[str, Any]]) -> Console:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    output = RichConsole(file=io.StringIO(), record=True, width=WIDTH, height=HEIGHT, force_terminal=True)
    run = config["run"]
    console = Console(run_dir, max_steps=run["max_steps"], num_epochs=run.get("num_train_epochs"), output=output)
    for record in records:
        console.step(record)
    console._began = time.monotonic() - sum(record.get("perf/step_s", 0.0) for record in records)
    return console


if __name__ == "__main__":
    run, file, *at = sys.argv[1:]
    if at == ["end"]:
        draw_end(Path(run), Path(file))
    else:
        draw(Path(run), Path(file), int(at[0]) if at else None)

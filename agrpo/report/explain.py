"""`agrpo explain`: a run's verdicts in the terminal, once or whenever they change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from agrpo.metrics import split
from agrpo.metrics.findings import FINE, Finding, changes, findings
from agrpo.metrics.history import History
from agrpo.report.run_files import RunFiles, newest_run, read_run

RUNS = Path("runs")  # where runs lie unless they were told otherwise
LOOK_EVERY_S = 2.0


def explain(
    run: Path | None, live: bool, tell: Callable[[str], None] | None = None, every_s: float = LOOK_EVERY_S
) -> None:
    """Print the verdicts of `run` (default: the newest below `runs`); with `live` until the run ends."""
    tell = tell or _print
    folder = run or newest_run(RUNS)
    files = read_run(folder)
    tell(f"{folder}, step {History(files.records, {}).num_steps}, {files.end}")
    _tell_cause(files, tell)
    shown = _tell(files, tell)
    if live:
        _follow(folder, shown, tell, every_s)


def _follow(folder: Path, shown: list[Finding], tell: Callable[[str], None], every_s: float) -> None:
    """Look until the run's supervisor is gone; what it wrote at its end is looked at too."""
    if not read_run(folder).is_active:
        tell("The run is not active.")
        return
    is_active = True
    while is_active:
        time.sleep(every_s)
        files = read_run(folder)
        is_active = files.is_active
        if not is_active:
            files = read_run(folder)
        found = findings(files.records, files.settings)
        if changes(shown, found):
            tell(f"\nstep {files.records[-1]['step']}, {time.strftime('%H:%M:%S')}")
            shown = _tell(files, tell)
    tell(f"\nThe run has ended: {files.end}.")
    _tell_cause(files, tell)


def _tell_cause(files: RunFiles, tell: Callable[[str], None]) -> None:
    if not files.is_active and files.cause:
        tell(files.cause)


def _tell(files: RunFiles, tell: Callable[[str], None]) -> list[Finding]:
    found = findings(files.records, files.settings)
    for line in lines(found):
        tell(line)
    for sentence in split.sentences(History(files.records, files.settings)):
        tell(f"devices  {sentence}")
    return found


def lines(found: list[Finding]) -> list[str]:
    """A line per verdict, and its override on a line of its own so that it can be copied."""
    if not found:
        return ["No step has been logged yet."]
    told = []
    for finding in found:
        told.append(f"{finding.level:<8} {finding.rule}: {finding.text}")
        if finding.override and finding.level != FINE:
            told.append(f"         {finding.override}")
    return told


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)

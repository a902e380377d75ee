"""`agrpo doctor`: everything that can go wrong in a long run, looked at before it. Fast parts first.

Parts that need nothing but this machine are looked at here. Those that run user code or load something each have a
process of their own (`doctor_child.py`), so that one that hangs or dies ends at its deadline and hides no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agrpo.config import Config, save
from agrpo.errors import ConfigError, ServerError
from agrpo.launch import doctor_host, plan
from agrpo.launch import job as jobs
from agrpo.launch.check import STYLES
from agrpo.launch.doctor_host import Finding

if TYPE_CHECKING:
    from agrpo.config.runner import Job, Request

FOLDER = ".doctor"  # in the run's folder: on its disk, visible to whoever the run's files are visible to
PART_S = 120.0  # for one part without a server
STEP_S = 600.0  # for a step, beyond what the server may take to start
OWN_FIX = re.compile(r"; (?:fix: |run: )?((?:pip install|add|choose|give|install|lower|name|raise|remove|rename|set|use) .+)")
FIXES = {
    "configuration": "change the key that it names; `agrpo train OVERRIDES --cfg job` prints what was composed",
    "data": "choose other data (data.path) or mend these: a run would end with this error",
    "rewards": "mend what scorer.functions names: a run would end with this error",
    "tools": "mend what env or rollout.workflow names: a run would end with this error",
    "server": "read the server's own log, and start it with the command that `agrpo serve OVERRIDES --print` gives",
    "step": "mend what it names: a run would end with this error",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    as_json: bool = False
    with_server: bool = True
    part_s: float = PART_S
    step_s: float = STEP_S


def examine(request: Request, options: Options) -> None:
    """Look at everything, print the table; ServerError (exit code 4) if a part failed."""
    from agrpo.config import runner

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever ends it, nothing is left behind
    jobs_found: list[Job] = []
    faults: list[Finding] = []
    try:
        runner.run(request, jobs_found.append)
    except ConfigError as error:
        faults = _config_faults(error)
    findings: list[Finding] = []
    printer = _Printer(options.as_json)
    for finding in _findings(jobs_found[0] if jobs_found else None, faults, options):
        findings.append(with_fix(finding))
        printer.add(findings[-1])
    printer.close(findings)
    failed = list(dict.fromkeys(f.name for f in findings if f.status == "fail"))
    if failed:
        raise ServerError(f"failed: {', '.join(failed)}")


def with_fix(finding: Finding) -> Finding:
    """A failure says what to do: what its own text ends with, else what helps against any failure of that part."""
    if finding.status != "fail" or finding.fix:
        return finding
    if own := OWN_FIX.search(finding.found):
        return dataclasses.replace(finding, found=finding.found[: own.start()], fix=own[1])
    return dataclasses.replace(finding, fix=FIXES.get(finding.name.partition(":")[0], FIXES["step"]))


def _findings(job: Job | None, faults: list[Finding], options: Options) -> Iterator[Finding]:
    yield from doctor_host.machine()
    if job is None:
        yield from faults
        return
    try:
        config, warnings = jobs.check(job.tree, job.devices)
    except ConfigError as error:
        yield from _config_faults(error)
        yield Finding("rest", "skip", "the other parts need a configuration that can start")
        return
    config = plan.resolved(config)
    yield Finding("configuration", "ok", f"complete; run folder {config.run.output_dir}")
    yield from (Finding("configuration", "warn", line) for line in warnings)
    yield from doctor_host.room(config)
    yield from _in_processes(config, job.overrides, options)


def _config_faults(error: ConfigError) -> list[Finding]:
    return [Finding("configuration", "fail", line) for line in error.problems]


def _in_processes(config: Config, overrides: list[str], options: Options) -> Iterator[Finding]:
    scratch = Path(config.run.output_dir).absolute() / FOLDER
    existed = scratch.parent.exists()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    keep = False
    try:
        save(config, scratch, overrides)
        for finding in _of_parts(config, scratch, options):
            keep |= str(scratch) in finding.fix
            yield finding
    finally:
        if not keep:  # else a fix names a log file there
            shutil.rmtree(scratch if existed else _emptied(scratch), ignore_errors=True)


def _of_parts(config: Config, scratch: Path, options: Options) -> Iterator[Finding]:
    for name in ("data", "rewards", "tools"):
        yield from _part(name, scratch, options.part_s)
    if not options.with_server:
        if not plan.is_managed(config):
            yield from _part("server", scratch, options.part_s)
        yield Finding("step", "skip", "no server is started and no weights are sent (--no-server)")
        return
    limit = (config.server.timeout if plan.is_managed(config) else 0) + options.step_s
    yield from _part("step", scratch, limit, config.checkpoint.hub.token)
    if config.run.num_nodes > 1:
        text = f"the step ran on this machine alone; the {config.run.num_nodes - 1} that join at {config.run.master} are not looked at"
        yield Finding("nodes", "skip", text)


def _emptied(scratch: Path) -> Path:
    """The run's folder where it holds nothing else, so that a run that was only looked at leaves none behind."""
    return scratch.parent if os.listdir(scratch.parent) == [scratch.name] else scratch


def _part(name: str, scratch: Path, limit_s: float, token: str | None = None) -> Iterator[Finding]:
    """The findings of one process as it makes them, and one more where it did not end well in time."""
    out, log = scratch / f"{name}.jsonl", scratch / f"{name}.log"
    out.touch()
    began, environment = time.monotonic(), {**os.environ, **({"HF_TOKEN": token} if token else {})}
    environment["PYTHONPATH"] = os.pathsep.join([p for p in (os.getcwd(), os.environ.get("PYTHONPATH")) if p])
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "agrpo.launch.doctor_child", name, str(scratch)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    num_told, has_failed = 0, False
    try:
        while True:
            code = child.poll()
            lines = out.read_text().splitlines(keepends=True)
            for line in lines[num_told:]:
                if line.endswith("\n"):
                    num_told += 1
                    finding = Finding(**json.loads(line))
                    has_failed |= finding.status == "fail"
                    yield finding
            if code is not None:
                break
            if time.monotonic() - began > limit_s:
                yield _overdue(name, log, limit_s)
                return
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code and not has_failed:
        text = f"its process ended with exit code {code}: {last_line(log) or 'it said nothing'}"
        fix = f"read its log, {log}" if log.stat().st_size else "look for what killed it: often the memory was used up (dmesg)"
        yield Finding(name, "fail", text, fix, time.monotonic() - began)


def _overdue(name: str, log: Path, limit_s: float) -> Finding:
    flag, said, logs = "--step-limit" if name == "step" else "--limit", last_line(log), log.parent / "run" / "logs"
    return Finding(
        name,
        "fail",
        f"not through within {limit_s:g} s" + (f"; the last it said: {said}" if said else ""),
        f"read in {logs if logs.exists() else log} what it waits for, or allow more with {flag} SECONDS",
        limit_s,
    )


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


class _Printer:
    """One line per finding as it comes where the output is piped; on a terminal a table at the end; or one JSON object."""

    def __init__(self, as_json: bool):
        self._as_json, self._console = as_json, Console()
        self._status = self._console.status("")

    def add(self, finding: Finding) -> None:
        if self._as_json:
            return
        if self._console.is_terminal:
            self._status.start()
            self._status.update(f"{finding.status}: {escape(finding.name)}")
            return
        took = f" ({finding.seconds:.1f} s)" if finding.seconds else ""
        fix = f"; fix: {finding.fix}" if finding.fix else ""
        print(f"{finding.status:<4}  {finding.name}: {finding.found}{fix}{took}", flush=True)

    def close(self, findings: list[Finding]) -> None:
        self._status.stop()
        if self._as_json:
            is_ok = all(f.status != "fail" for f in findings)
            print(json.dumps({"ok": is_ok, "rows": [dataclasses.asdict(f) for f in findings]}, indent=1))
        elif self._console.is_terminal:
            self._console.print(_table(findings))


def _table(findings: list[Finding]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("part", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("s", justify="right", no_wrap=True)
    for f in findings:
        fix = f"\n[bold]fix:[/] {escape(f.fix)}" if f.fix else ""
        table.add_row(
            f"[{STYLES[f.status]}]{f.status}[/]", escape(f.name), escape(f.found) + fix, f"{f.seconds:.1f}" if f.seconds else ""
        )
    return table

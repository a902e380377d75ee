"""The checks of the servers: at the start of a run, and as `agrpo serve-check`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agrpo.config import Config
from agrpo.errors import ServerError
from agrpo.launch import job as jobs
from agrpo.launch import plan, serve
from agrpo.launch.prompts import long_prompts
from agrpo.serve.check import Row, run_checks

if TYPE_CHECKING:
    from agrpo.config.runner import Job
    from agrpo.serve.flags import ServerCommand

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def check_at_start(
    config: Config, urls: Sequence[str], run_dir: Path, note: Callable[[str], None], prompts: Any = None
) -> None:
    """Raise ServerError with every failed row and its fix; each warning becomes a note. `config` is resolved."""
    rows = rows_of(config, urls, run_dir, prompts)
    for row in rows:
        if row.status == "warn":
            note(f"warning: {line(row)}")
    raise_failed(rows)


def rows_of(config: Config, urls: Sequence[str], run_dir: Path, prompts: Any = None) -> list[Row]:
    """Every row of the servers of a run; `config` is resolved."""
    if plan.is_managed(config):
        devices = (config.run.devices or {}).get("server", [])
        commands = [config.server.planned(run_dir, config, 0, len(devices)) for _ in urls]
    else:
        commands = serve.commands(config)
    return run_checks(config, urls, commands, run_dir, prompts)


def raise_failed(rows: Sequence[Row]) -> None:
    """ServerError with every failed row and its fix, if any."""
    failed = [row for row in rows if row.status == "fail"]
    if failed:
        text = "\n".join(f"  {line(row)}" for row in failed)
        raise ServerError(f"the server does not fit this configuration; agrpo serve-check shows every check:\n{text}")


def serve_check(job: Job, as_json: bool, with_probe: bool) -> None:
    """Print the table of one composed job; ServerError if a row failed (SRV-5 to SRV-13)."""
    config, _ = jobs.check(job.tree, job.devices)
    config = plan.resolved(config)
    run_dir = Path(config.run.output_dir).absolute()
    commands = serve.commands(config)
    urls = [command.url for command in commands]
    rows = run_checks(config, urls, commands, run_dir, long_prompts(config))
    if with_probe:
        rows += _probed(config, urls, run_dir, rows)
    show_json(rows, commands) if as_json else show(rows, commands)
    failed = list(dict.fromkeys(row.name for row in rows if row.status == "fail"))
    if failed:
        raise ServerError(f"failed: {', '.join(failed)}")


def _probed(config: Config, urls: Sequence[str], run_dir: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows that need the model; left out where the server could not take part."""
    needed = {"reachable", "development mode", "model", "weight transfer", "token endpoint"}
    missing = [row.name for row in rows if row.status == "fail" and row.name in needed]
    if missing:
        return [Row(urls[0], "probe", "skip", f"needs {', '.join(dict.fromkeys(missing))}")]
    from agrpo.train.probe import probe

    return probe(config, urls, run_dir)


def line(row: Row) -> str:
    """One row as a line of plain text."""
    return f"{row.name}: {row.found}" + (f"; fix: {row.fix}" if row.fix else "")


def show_json(rows: Sequence[Row], commands: Sequence[ServerCommand]) -> None:
    answer = {
        "ok": all(row.status != "fail" for row in rows),
        "rows": [dataclasses.asdict(row) for row in rows],
        "commands": [command.line() for command in commands],
    }
    print(json.dumps(answer, indent=1))


def show(rows: Sequence[Row], commands: Sequence[ServerCommand]) -> None:
    """A table on a terminal, else one line per row; then what this configuration would start (CLI-5)."""
    console = Console()
    for command in commands:
        own = [row for row in rows if row.url == command.url]
        if console.is_terminal:
            console.print(_table(command.url, own))
        else:
            print(command.url)
            print("\n".join(f"{row.status:<4}  {line(row)}" for row in own))
    print("\nThe command of this configuration, to start the server with:")
    for command in commands:
        # Unwrapped, so that it can be copied.
        sys.stdout.write(command.line() + "\n")


def _table(url: str, rows: Sequence[Row]) -> Table:
    table = Table(title=escape(url), title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("server", overflow="fold")
    for row in rows:
        fix = f"\n[bold]fix:[/] {escape(row.fix)}" if row.fix else ""
        table.add_row(f"[{STYLES[row.status]}]{row.status}[/]", row.name, escape(row.found) + fix)
    return table

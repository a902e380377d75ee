"""What the user sees of a run: start-up phases, then the steps, at the end the curve and where everything is.

On a terminal a live view that fits 80 columns; otherwise one line per phase and per step, plain ASCII. Used by the
supervisor, which gives it what the other processes wrote; it loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agrpo.metrics.chart import curve
from agrpo.metrics.completions import completion_table, plain_line
from agrpo.metrics.live import VERDICTS, Glance, aligned, short_number, sides, token_line
from agrpo.metrics.output import Unfailing
from agrpo.metrics.summary import evaluation_text, evaluations

SHOWN_STEPS = 5  # rows of the live table
SHORTEST_CURVE, TALLEST_CURVE = 6, 14  # lines
REFRESHES_PER_S = 0.5  # drawing takes a few milliseconds of a core that the trainer may need
CURVE_FILE = "curve.txt"

# Phases that the live view names after the first step; the others are the usual work.
UNUSUAL = ("saving", "exporting", "evaluating", "sending the weights", "waiting for the server", "ending", "finishing")

# key of a record, heading, short name in a line, unit, how the value is written
COLUMNS = (
    ("reward", "reward", "", lambda v: f"{v:.2f}"),
    ("loss", "loss", "", lambda v: f"{v:.3f}"),
    ("sample/staleness_mean", "staleness", "", lambda v: f"{v:.1f}"),
    ("perf/wall_clock_forwarded_tokens_per_s", "tokens/s", "", lambda v: short_number(v)),
    ("perf/rollout_wait_s", "wait", "s", lambda v: f"{v:.1f}"),
    ("perf/step_s", "step", "s", lambda v: f"{v:.1f}"),
)


def clock(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def step_line(record: Mapping[str, Any], max_steps: int | None = None) -> str:
    """One step in one line; what the record lacks is left out (LOG-5)."""
    step = record["step"]
    parts = [f"step {step}/{max_steps}" if max_steps else f"step {step}"]
    for key, name, unit, written in COLUMNS:
        if record.get(key) is not None:
            parts.append(f"{name} {written(record[key])}{unit}")
    if record.get("diag/bottleneck"):
        parts.append(str(record["diag/bottleneck"]))
    parts += [f"{name} {point['reward']:.2f}" for name, point in _evaluated(record).items()]
    return "  ".join(parts)


class Console:
    """Shows one run of `max_steps`, else of `num_epochs`. `live=None` decides by the terminal; `shows_steps=False` leaves
    phases, failures and the end; `quiet` leaves the start, warnings and the end. An output that fails is off, no more."""

    def __init__(
        self,
        run_dir: Path,
        *,
        max_steps: int | None = None,
        num_epochs: float | None = None,
        live: bool | None = None,
        shows_steps: bool = True,
        quiet: bool = False,
        output: RichConsole | None = None,
    ):
        self.run_dir, self.max_steps, self.shows_steps = Path(run_dir), max_steps, shows_steps
        self._num_epochs = None if max_steps else num_epochs
        self.output, self.quiet = output or RichConsole(highlight=False), quiet
        self.output.file = Unfailing(self.output.file, "the console")
        self.is_live = (self.output.is_terminal if live is None else live) and not quiet
        self._began = time.monotonic()
        self._phases: dict[str, tuple[str, float]] = {}  # process -> phase, when it began
        self._told: set[tuple[str, str]] = set()  # phases that have a line already
        self._history = Glance(tuple(key for key, *_ in COLUMNS), SHOWN_STEPS)
        self._view: Live | None = None

    def __enter__(self) -> Console:
        length = f", {self.max_steps} steps" if self.max_steps else ""
        if self._num_epochs:
            length = f", {self._num_epochs:g} epoch{'' if self._num_epochs == 1 else 's'}"
        self.note(f"run {self.run_dir}{length}")
        if self.is_live:
            self._view = Live(
                get_renderable=self.render, console=self.output, transient=True, refresh_per_second=REFRESHES_PER_S
            )
            self._view.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live view; what is printed later stays below."""
        view, self._view = self._view, None
        if view is not None:
            view.stop()

    def phase(self, process: str, text: str) -> None:
        """A process entered a phase; each is a line once, before the first step, where nothing is drawn live."""
        if self._phases.get(process, ("",))[0] == text:
            return
        self._phases[process] = (text, time.monotonic())
        if not self.is_live and not self.quiet and not self._history and (process, text) not in self._told:
            self._told.add((process, text))
            self._event_line(process, text)

    def event(self, process: str, text: str) -> None:
        """Something happened to a process; a line that stays, whatever else is shown."""
        self._phases[process] = (text, time.monotonic())
        self._event_line(process, text)

    def progress(self, process: str, text: str) -> None:
        """How far a process is that takes long; as an event, but for a quiet console."""
        if not self.quiet:
            self.event(process, text)

    def _event_line(self, process: str, text: str) -> None:
        self.note(f"[{time.monotonic() - self._began:6.1f} s] {process}: {text}")

    def step(self, record: Mapping[str, Any]) -> None:
        """A record of `metrics.jsonl`."""
        self._history.add(record)
        if not self.is_live and self.shows_steps and not self.quiet:
            self.note(step_line(record, self.max_steps))

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rollouts of the window before the last record (LOG-7)."""
        if self.is_live and rows:
            self.output.print(completion_table(rows, self._safe))
        elif not self.quiet:
            for row in rows:
                self.note(plain_line(row))

    def note(self, text: str) -> None:
        """A line that stays: above the live view, or simply the next line."""
        self.output.print(Text(self._safe(text)), soft_wrap=True)

    def prose(self, text: str) -> None:
        """As `note`, but a terminal gets it broken between words, not wherever its line ends."""
        self.output.print(Text(self._safe(text)), soft_wrap=not self.output.is_terminal)

    def fail(self, verdicts: Sequence[str]) -> None:
        """The end of a run that failed: what its records say, before the failure itself is printed."""
        self.close()
        for line in ("", *verdicts, "") if verdicts else ():
            self.prose(line)

    def finish(
        self,
        summary: Mapping[str, Any],
        paths: Mapping[str, str | Path],
        records: Sequence[Mapping[str, Any]] = (),
        verdicts: Sequence[str] = (),
    ) -> None:
        """The reward curve, each evaluation before and after, where the tokens went, verdicts, and where everything is.

        Saves the curve as text. `records` are those that `step` has not seen.
        """
        self.close()
        for record in records:
            self._history.add(record)
        chart = self._curve(TALLEST_CURVE, ascii_only=self._is_ascii)
        if chart:
            try:
                (self.run_dir / CURVE_FILE).write_text(self._curve(TALLEST_CURVE, ascii_only=True) + "\n")
            except OSError as error:  # the run is over and saved
                self.note(f"{self.run_dir / CURVE_FILE} was not written: {error.strerror}")
            if not self.quiet:
                self.note(f"\n{self._title()}\n{chart}")
        for name, points in (summary.get("eval") or self._history.evaluations).items():
            self.note(evaluation_line(name, points))
        if summary.get("tokens"):
            self.prose(token_line(summary["tokens"]))
        for line in ("", *verdicts, "") if verdicts else ("",):
            self.prose(line)
        width = max((len(label) for label in paths), default=0)
        for label, path in paths.items():
            self.note(f"{label:<{width}}  {path}")

    def render(self) -> RenderableType:
        """The live view: phases before the first record; then progress, the two sides, the last steps and the curve."""
        history = self._history
        if not history:
            elapsed = Text(f"starting   {clock(time.monotonic() - self._began)}", style="bold")
            return Group(elapsed, self._phase_table())
        # One text instead of tables: it is drawn often, and rich takes long for a table.
        lines: list[tuple[str, str]] = [(self._progress_line(), "bold"), ("", "")]
        lines += [(line, "") for line in aligned(sides(history.latest), "lrl")]
        verdict = history.latest.get("diag/bottleneck")
        if verdict:
            lines.append((VERDICTS.get(verdict, verdict), "green" if verdict == "balanced" else "yellow"))
        if self.shows_steps:
            heading, *steps = aligned(self._step_rows(), "r" * (len(COLUMNS) + 1) + "l")
            lines += [("", ""), (heading, "dim"), *((line, "") for line in steps)]
        below = [(evaluation_line(name, points), "") for name, points in history.evaluations.items()]
        below += [(line, "dim") for line in self._elsewhere()]
        height = self.output.height - len(lines) - len(below) - 3
        chart = self._curve(min(max(height, SHORTEST_CURVE), TALLEST_CURVE), ascii_only=self._is_ascii)
        if chart:
            lines += [("", ""), (self._title(), "dim"), *((line, "") for line in chart.splitlines())]
        text = Text(no_wrap=True, overflow="ellipsis")
        for line, style in lines + below:
            text.append(line + "\n", style or None)
        text.right_crop(1)
        return Group(text)  # console.print would join a bare text with others, and wrap it

    def _elsewhere(self) -> list[str]:
        """What processes do beside the usual, such as saving or evaluating."""
        now = time.monotonic()
        return [
            f"{process}: {text}  {clock(now - since)}"
            for process, (text, since) in self._phases.items()
            if text.startswith(UNUSUAL)
        ]

    @property
    def _is_ascii(self) -> bool:
        return not self.output.is_terminal or self.output.options.ascii_only

    def _safe(self, text: str) -> str:
        """Text that the output can encode."""
        encoding = self.output.encoding or "ascii"
        return text.encode(encoding, "replace").decode(encoding, "replace")

    def _curve(self, height: int, ascii_only: bool) -> str:
        width = min(self.output.width, 100) - 2
        return curve(self._history.rewards, self._history.marks, width=width, height=height, ascii_only=ascii_only)

    def _title(self) -> str:
        names = list(self._history.evaluations)
        return "reward by step" + (f"   (O = {', '.join(names)})" if names else "")

    def _phase_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        now = time.monotonic()
        for process, (text, since) in self._phases.items():
            table.add_row(Text(process, style="bold"), Text(text), Text(f"{now - since:.1f} s", style="dim"))
        return table

    def _step_rows(self) -> list[list[str]]:
        headings = [name + (f" {unit}" if unit else "") for _, name, unit, _ in COLUMNS]
        rows = [["step", *headings, "bottleneck"]]
        for record in self._history.rows:
            cells = [written(record[key]) if record.get(key) is not None else "-" for key, _, _, written in COLUMNS]
            rows.append([str(record["step"]), *cells, str(record.get("diag/bottleneck", ""))])
        return rows

    def _progress_line(self) -> str:
        history = self._history
        elapsed = f"elapsed {clock(time.monotonic() - self._began)}"
        done = history.done(self.max_steps, self._num_epochs)
        if done is None:
            return f"step {history.step}   {elapsed}"
        filled = round(24 * done)
        bar = "#" * filled + "-" * (24 - filled)
        left = history.time_left_s(self.max_steps, self._num_epochs)
        to_go = f"   left {clock(left)}" if left is not None else ""
        step = f"step {history.step}"
        step += f"/{self.max_steps}" if self.max_steps else f"  epoch {history.latest['epoch']:.2f}/{self._num_epochs:g}"
        return f"{step} [{bar}]   {elapsed}{to_go}"


def evaluation_line(name: str, points: Mapping[str, Mapping[str, Any]]) -> str:
    """`heldout  0.52 (version 0) -> 0.94 (version 60)`; one figure while there is only one."""
    return f"{name}  {evaluation_text(points)}"


def _evaluated(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: points["after"] for name, points in evaluations([record]).items()}

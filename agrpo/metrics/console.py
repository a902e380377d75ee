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
from agrpo.metrics.summary import evaluations

SHOWN_STEPS = 8  # rows of the live table
RECENT_STEPS = 10  # steps that the time left is estimated from
CURVE_FILE = "curve.txt"

# key of a record, heading, short name in a line, unit, how the value is written
COLUMNS = (
    ("reward", "reward", "", lambda v: f"{v:.2f}"),
    ("loss", "loss", "", lambda v: f"{v:.3f}"),
    ("sample/staleness_mean", "staleness", "", lambda v: f"{v:.1f}"),
    ("perf/wall_clock_forwarded_tokens_per_s", "tokens/s", "", lambda v: short_number(v)),
    ("perf/rollout_wait_s", "wait", "s", lambda v: f"{v:.1f}"),
    ("perf/step_s", "step", "s", lambda v: f"{v:.1f}"),
)


def short_number(value: float) -> str:
    """4800 -> 4.8k, 1234567 -> 1.2M, 37 -> 37."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.1f}{letter}" if abs(scaled) < 100 else f"{scaled:.0f}{letter}"
    return f"{value:.0f}"


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
    """Shows one run. `live=None` decides by the terminal; `shows_steps=False` leaves phases, failures and the end."""

    def __init__(
        self,
        run_dir: Path,
        *,
        max_steps: int | None = None,
        live: bool | None = None,
        shows_steps: bool = True,
        output: RichConsole | None = None,
    ):
        self.run_dir, self.max_steps, self.shows_steps = Path(run_dir), max_steps, shows_steps
        self.output = output or RichConsole(highlight=False)
        self.is_live = self.output.is_terminal if live is None else live
        self._began = time.monotonic()
        self._phases: dict[str, tuple[str, float]] = {}  # process -> phase, when it began
        self._records: list[Mapping[str, Any]] = []
        self._view: Live | None = None

    def __enter__(self) -> Console:
        if self.is_live:
            self._view = Live(get_renderable=self.render, console=self.output, transient=True)
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
        """A process entered a phase of its start; repeating the same phase changes nothing."""
        if self._phases.get(process, ("",))[0] == text:
            return
        self._phases[process] = (text, time.monotonic())
        if not self.is_live and not self._records:
            self.note(f"[{time.monotonic() - self._began:6.1f} s] {process}: {text}")

    def event(self, process: str, text: str) -> None:
        """Something happened to a process; a line that stays, whatever else is shown."""
        self._phases[process] = (text, time.monotonic())
        self.note(f"[{time.monotonic() - self._began:6.1f} s] {process}: {text}")

    def step(self, record: Mapping[str, Any]) -> None:
        """A record of `metrics.jsonl`."""
        self._records.append(record)
        if not self.is_live and self.shows_steps:
            self.note(step_line(record, self.max_steps))

    def note(self, text: str) -> None:
        """A line that stays: above the live view, or simply the next line."""
        self.output.print(Text(self._safe(text)), soft_wrap=True)

    def failure(self, text: str) -> None:
        """Why the run ended, after which nothing moves any more."""
        self.close()
        self.output.print(Text(self._safe(text), style="bold red"), soft_wrap=True)

    def finish(
        self,
        summary: Mapping[str, Any],
        paths: Mapping[str, str | Path],
        records: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """The reward curve, each evaluation before and after, and where everything is; saves the curve as text."""
        self.close()
        records = self._records if records is None else records
        chart = self._curve(records, height=14, ascii_only=self._is_ascii)
        if chart:
            (self.run_dir / CURVE_FILE).write_text(self._curve(records, height=14, ascii_only=True) + "\n")
            self.note(f"\n{_title(records)}\n{chart}")
        for name, points in (summary.get("eval") or evaluations(records)).items():
            self.note(evaluation_line(name, points))
        self.note("")
        width = max((len(label) for label in paths), default=0)
        for label, path in paths.items():
            self.note(f"{label:<{width}}  {path}")

    def render(self) -> RenderableType:
        """The live view: phases before the first record, then progress, the last steps and a small curve."""
        if not self._records:
            return self._phase_table()
        parts: list[RenderableType] = [Text(self._progress_line())]
        if self.shows_steps:
            parts.append(self._step_table())
        for name, points in evaluations(self._records).items():
            parts.append(Text(evaluation_line(name, points)))
        chart = self._curve(self._records, height=8, ascii_only=self._is_ascii)
        return Group(*parts, Text(f"{_title(self._records)}\n{chart}" if chart else ""))

    @property
    def _is_ascii(self) -> bool:
        return not self.output.is_terminal or self.output.options.ascii_only

    def _safe(self, text: str) -> str:
        """Text that the output can encode."""
        encoding = self.output.encoding or "ascii"
        return text.encode(encoding, "replace").decode(encoding, "replace")

    def _curve(self, records: Sequence[Mapping[str, Any]], height: int, ascii_only: bool) -> str:
        line = [(r["step"], r["reward"]) for r in records if r.get("reward") is not None]
        marks = [(r["step"], point["reward"]) for r in records for point in _evaluated(r).values()]
        width = min(self.output.width, 100) - 2
        return curve(line, marks, width=width, height=height, ascii_only=ascii_only)

    def _phase_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for process, (text, since) in self._phases.items():
            table.add_row(Text(process, style="bold"), Text(text), Text(f"{now - since:.1f} s", style="dim"))
        return table

    def _step_table(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        for heading in ("step", *(name + (f" {unit}" if unit else "") for _, name, unit, _ in COLUMNS), "bottleneck"):
            table.add_column(heading, justify="left" if heading == "bottleneck" else "right", no_wrap=True)
        for record in _by_step(self._records)[-SHOWN_STEPS:]:
            cells = [written(record[key]) if record.get(key) is not None else "-" for key, _, _, written in COLUMNS]
            table.add_row(str(record["step"]), *cells, str(record.get("diag/bottleneck", "")))
        return table

    def _progress_line(self) -> str:
        step = self._records[-1]["step"]
        elapsed = f"elapsed {clock(time.monotonic() - self._began)}"
        if not self.max_steps:
            return f"step {step}   {elapsed}"
        filled = round(24 * min(step / self.max_steps, 1.0))
        bar = "#" * filled + "-" * (24 - filled)
        left = self.time_left_s()
        to_go = f"   left {clock(left)}" if left is not None else ""
        return f"step {step}/{self.max_steps} [{bar}]   {elapsed}{to_go}"

    def time_left_s(self) -> float | None:
        """Steps to go times the mean time of the recent ones; None while unknown."""
        durations = [r["perf/step_s"] for r in self._records[-RECENT_STEPS:] if r.get("perf/step_s") is not None]
        if not self.max_steps or not durations:
            return None
        return max(self.max_steps - self._records[-1]["step"], 0) * sum(durations) / len(durations)


def _by_step(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row per trained step: records of one step are joined, those without a column to show are left out."""
    rows: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if any(record.get(key) is not None for key, *_ in COLUMNS):
            rows[record["step"]] = {**rows.get(record["step"], {}), **record}
    return list(rows.values())


def evaluation_line(name: str, points: Mapping[str, Mapping[str, Any]]) -> str:
    """`heldout  0.52 (version 0) -> 0.94 (version 60)`; one figure while there is only one."""

    def written(point: Mapping[str, Any]) -> str:
        version = point.get("version")
        return f"{point['reward']:.3f}" + (f" (version {version:.0f})" if version is not None else "")

    before, after = points["before"], points["after"]
    return f"{name}  {written(before)}" + (f" -> {written(after)}" if after is not before and after != before else "")


def _evaluated(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: points["after"] for name, points in evaluations([record]).items()}


def _title(records: Sequence[Mapping[str, Any]]) -> str:
    names = list(evaluations(records))
    return "reward by step" + (f"   (O = {', '.join(names)})" if names else "")

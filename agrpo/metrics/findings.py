"""What a run's records say about it, in sentences: the figure, its cause, and the setting to change.

The rules are those of the documents' reading tables (DIAG-1 to DIAG-6) and more of the same kind. Each is a function of
the run's history that returns a finding or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agrpo.metrics.history import History
from agrpo.metrics.sinks import read_records

WARNING, NOTE, FINE = "warning", "note", "fine"
_ORDER = (WARNING, NOTE, FINE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict."""

    rule: str  # a name that stays, in words joined by hyphens
    level: str  # warning: act; note: know; fine
    figure: str  # what was measured
    cause: str  # what that means
    change: str = ""  # what to do
    override: str = ""  # the same for the command line, where a setting does it
    see: str = ""  # the rule whose finding has the cause of this one

    @property
    def text(self) -> str:
        return " ".join(part for part in (f"{self.figure}: {self.cause}.", self.change) if part)


Rule = Callable[[History], Finding | None]


def findings(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Finding]:
    """All that the rules find, the most urgent first; [] before the first step."""
    from agrpo.metrics import rules_of_flow, rules_of_signal

    history = History(records, settings)
    found = [rule(history) for rule in (*rules_of_signal.RULES, *rules_of_flow.RULES)]
    return sorted((f for f in found if f is not None), key=lambda f: _ORDER.index(f.level))


def changes(before: Sequence[Finding], after: Sequence[Finding]) -> bool:
    """Whether the verdicts differ, their figures aside."""
    return {(f.rule, f.level) for f in before} != {(f.rule, f.level) for f in after}


def closing(run_dir: Path, most: int = 3) -> list[str]:
    """A few lines for the end of a run: what should be acted on, else that nothing has to be. Never an error."""
    try:
        path = run_dir / "config.yaml"
        settings = yaml.safe_load(path.read_text()) if path.exists() else {}
        found = findings(read_records(run_dir), settings)
    except Exception as error:  # the run is over and saved: advice on it must not make it a failed one
        return [f"no verdict: {type(error).__name__}: {error}"]
    urgent = [f for f in found if f.level == WARNING][:most]
    causes = [f for f in found if f.rule in {u.see for u in urgent} and f not in urgent]
    return [f"{f.rule}: {f.text} {f.override}".rstrip() for f in [*urgent, *causes] or found[:1]]


def share(value: float) -> str:
    """0.423 -> 42 %; below one per cent with one digit."""
    return f"{100 * value:.0f} %" if value >= 0.01 or value == 0 else f"{100 * value:.1f} %"

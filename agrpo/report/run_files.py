"""A run's folder, read back: records, configuration, timeline, how it ended."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agrpo.errors import ConfigError
from agrpo.lifecycle import FAILURE
from agrpo.metrics.sinks import read_lines, read_records
from agrpo.metrics.summary import FILE_NAME

_LONGEST_CAUSE = 4000  # characters
_DEPTH = 4  # folders between a sweep's folder, or `runs`, and a run in it


@dataclass(frozen=True, slots=True)
class RunFiles:
    """One run as its files have it now."""

    folder: Path
    name: str  # what tells it from the others that are shown with it
    settings: dict[str, Any]  # config.yaml
    records: list[dict[str, Any]]
    summary: dict[str, Any]  # {} before it has ended, or after it was killed
    overrides: list[str]
    trouble: str = ""  # why it cannot be read; empty where it can

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of trained steps; the last evaluation has one of its own, which is left out."""
        return [r for r in self.records if "perf/step_s" in r]

    @property
    def end(self) -> str:
        """How it ended, in a line; `running` while it does."""
        if self.is_active:
            return "running"
        if self.cause:
            return "failed"
        return str(self.summary.get("exit_reason") or "ended without a summary")

    @property
    def cause(self) -> str:
        """Why it failed, in one or more lines: what the run said at its end, else what its processes left behind."""
        path = self.folder / FAILURE
        if path.exists():
            return path.read_text(encoding="utf-8", errors="replace").strip()[:_LONGEST_CAUSE]
        if self.summary:
            return ""
        exits = [_json(path) for path in sorted((self.folder / "state").glob("*.exit.json"))]
        return "\n".join(f"{e.get('process')}: {e.get('reason')}" for e in exits if e.get("code"))[:_LONGEST_CAUSE]

    def spans(self) -> dict[str, list[dict[str, Any]]]:
        """Process -> what it did, oldest first: {"what", "start", "end"}, seconds since the epoch."""
        found = {}
        for path in sorted((self.folder / "timeline").glob("*.jsonl")):
            whole = (s for s in read_lines(path) if {"what", "start", "end"} <= s.keys())
            found[path.stem] = sorted(whole, key=lambda s: s["start"])
        return found

    @property
    def is_active(self) -> bool:
        """Whether its supervisor lives: it holds the lock of the folder."""
        path = self.folder / "state" / "lock"
        if not path.exists():
            return False
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a file system that knows no locks
                return not any((self.folder / name).exists() for name in (FILE_NAME, FAILURE))
        return False


def read_run(folder: Path, name: str | None = None) -> RunFiles:
    """One run. ConfigError where the folder is none."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} holds no run (config.yaml); give a run's folder, as agrpo train prints it at its end"
        )
    run = _read(folder, name or folder.name)
    if run.trouble:
        raise ConfigError(f"{run.trouble}; give the folder of another run")
    return run


def _read(folder: Path, name: str) -> RunFiles:
    """One run, with its trouble where its configuration cannot be read."""
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        return RunFiles(folder, name, {}, [], {}, [], f"{path} cannot be read: {' '.join(str(error).split())}")
    if not isinstance(settings, dict):
        return RunFiles(folder, name, {}, [], {}, [], f"{path} holds no configuration")
    records = [r for r in read_records(folder) if isinstance(r["step"], int | float)]
    overrides = _json(folder / "versions.json").get("overrides")
    overrides = [str(o) for o in overrides] if isinstance(overrides, list) else []
    return RunFiles(folder, name, settings, records, _json(folder / FILE_NAME), overrides)


def read_runs(folders: list[Path]) -> list[RunFiles]:
    """Runs, and all runs of a folder that is not one itself, such as a sweep's; of several, some may have a trouble.

    ConfigError where there is none that can be read.
    """
    found: list[Path] = []
    for folder in folders:
        below = [folder] if (folder / "config.yaml").exists() else runs_below(folder)
        if not below:
            raise ConfigError(
                f"{folder} holds no run and no folder of runs (config.yaml); give those that agrpo train wrote"
            )
        found += [path for path in below if path not in found]
    runs = [_read(path, name) for path, name in zip(found, _names(found), strict=True)]
    if all(run.trouble for run in runs):
        raise ConfigError(f"{runs[0].trouble}; give the folder of another run")
    return runs


def newest_run(folder: Path) -> Path:
    """The run whose records changed last. ConfigError where there is none."""
    found = runs_below(folder)
    if not found:
        raise ConfigError(f"no run lies below {folder}; give a run's folder")
    return max(found, key=lambda path: max(_changed(path / "metrics.jsonl"), _changed(path / "config.yaml")))


def runs_below(folder: Path) -> list[Path]:
    """Folders with a config.yaml, at most `_DEPTH` levels down, in order; hidden ones hold no runs."""
    patterns = ("/".join(["*"] * depth) + "/config.yaml" for depth in range(1, _DEPTH + 1))
    found = (path.parent for pattern in patterns for path in folder.glob(pattern))
    return sorted({path for path in found if not _is_hidden(path.relative_to(folder))}, key=_by_number)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _by_number(path: Path) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in path.parts]


def _names(folders: list[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    for count in range(1, max((len(f.parts) for f in folders), default=1) + 1):
        names = ["/".join(f.parts[-count:]) for f in folders]
        if len(set(names)) == len(names):
            return names
    return [str(f) for f in folders]


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none, or only a part of one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""Where records go: always `metrics.jsonl`, and what `logger.sinks` names; all get the same values (LOG-8)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from agrpo.errors import ConfigError
from agrpo.metrics.background import Background

log = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
CONSOLE = "console"  # drawn by the supervisor from the file, not written by the trainer

Record = Mapping[str, float | int | str]


class Sink(Protocol):
    """Takes one record per logging window. Built as `Sink(section, run_dir, options)`."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sinks(section: Any, run_dir: Path, resumed_step: int | None = None) -> list[Sink]:
    """The sinks of a `logger` section; records after `resumed_step` are removed from the file, they come again.

    A sink other than the file may fail or hang: it is warned about and left out, and the run goes on.
    """
    sinks: list[Sink] = [Jsonl(run_dir, resumed_step)]
    for name in _chosen(section):
        sinks.append(Background(name, functools.partial(_open, name, section, run_dir)))
    return sinks


def _open(name: str, section: Any, run_dir: Path) -> Sink:
    return _sink_class(name)(section, run_dir, _options(section, name))


def problems(section: Any) -> list[str]:
    """Sinks that do not exist or whose package is missing, one line each."""
    lines = []
    for name in _chosen(section):
        if name in SINKS:
            package = SINKS[name][1]
            if importlib.util.find_spec(package) is None:
                lines.append(f'logger: {name} needs its package: pip install "agrpo[{name}]"; or use logger={CONSOLE}')
        elif "." not in name:
            allowed = ", ".join([CONSOLE, "none", *SINKS])
            lines.append(f"logger.sinks: unknown sink {name!r}; allowed: {allowed}, or the import path of a class")
    return lines


def _chosen(section: Any) -> list[str]:
    return [name for name, is_on in section.sinks.items() if is_on and name != CONSOLE]


def _options(section: Any, name: str) -> dict[str, Any]:
    """`logger.options` of one sink: its own mapping where there is one of its name, else all that are no other sink's."""
    own = section.options.get(name)
    return dict(own) if isinstance(own, Mapping) else {k: v for k, v in section.options.items() if k not in section.sinks}


def _sink_class(name: str) -> Any:
    if name in SINKS:
        return SINKS[name][0]
    if "." not in name:
        raise ConfigError(f"logger.sinks: unknown sink {name!r}")
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def finite(record: Record) -> dict[str, Any]:
    """The record as JSON can hold it, which knows no NaN: null instead."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class Jsonl:
    """One JSON object per line, written at once; values that are not finite are null.

    On a full disk the records are kept and written once there is room: training goes on.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None = None):
        path = Path(run_dir) / FILE_NAME
        keep_lines(path, lambda r: "step" in r and (resumed_step is None or r["step"] <= resumed_step))
        self._file = path.open("ab", buffering=0)
        self._pending, self._is_well = b"", True

    def write(self, step: int, record: Record) -> None:
        self._pending += (json.dumps({"step": step, **finite(record)}) + "\n").encode()
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if self._is_well:
                log.warning("%s cannot be written from step %d: %s; it is tried again each time", FILE_NAME, step, error)
            self._is_well = False
        else:
            self._is_well = True

    def close(self) -> None:
        if self._pending:
            log.warning("%s lacks the last %d bytes", FILE_NAME, len(self._pending))
        self._file.close()


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run so far, without a half-written last line; [] before the first."""
    return [record for record in read_lines(Path(run_dir) / FILE_NAME) if "step" in record]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, without lines that a killed process left half-written; none where it is not there."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Leave those lines of a JSONL file, if it is there, that `keep` is true of: what comes after the checkpoint that is
    resumed is made again. Half a line, which a killed process leaves, goes too."""
    if not path.is_file():  # nor is a link to /dev/null one, or to another device
        return
    beside = path.with_name(f".{path.name}")
    with beside.open("w", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in read_lines(path) if keep(line))
    beside.replace(path)


class Tensorboard:
    """Event files in `<run_dir>/tensorboard`; texts appear under the text tab."""

    def __init__(self, section: Any, run_dir: Path, options: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(**{"log_dir": str(Path(run_dir) / "tensorboard"), **options})

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            if name == "step":
                continue
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _named(section: Any, run_dir: Path) -> dict[str, Any]:
    """Project, name and configuration of a run, as services take them."""
    path = Path(run_dir) / "config.yaml"
    config = yaml.safe_load(path.read_text()) if path.exists() else {}
    return {"project": section.project, "name": section.run_name or Path(run_dir).name, "config": config}


class Wandb:
    """A run of the project `logger.project`; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, section: Any, run_dir: Path, options: dict[str, Any]):
        import wandb

        self._run = wandb.init(**{**_named(section, run_dir), "dir": str(run_dir), **options})

    def write(self, step: int, record: Record) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the project `logger.project`; `logger.options` may name a space."""

    def __init__(self, section: Any, run_dir: Path, options: dict[str, Any]):
        import trackio

        self._trackio = trackio
        trackio.init(**{**_named(section, run_dir), **options})

    def write(self, step: int, record: Record) -> None:
        self._trackio.log({k: v for k, v in record.items() if k != "step"}, step=step)

    def close(self) -> None:
        self._trackio.finish()


# name -> class, package it needs
SINKS: dict[str, tuple[Any, str]] = {
    "tensorboard": (Tensorboard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "trackio": (Trackio, "trackio"),
}

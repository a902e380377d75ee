"""Which folders are checkpoints, told by their files: the checks before a run know it without torch (RES-9)."""

from __future__ import annotations

import re
from pathlib import Path

SHARDS, UPDATER = "shards", "updater.json"
_NAME = re.compile(r"step-(\d+)$")


def is_complete(folder: Path) -> bool:
    """Whether the folder is a checkpoint that was written to its end; torch writes this file last."""
    return (folder / SHARDS / ".metadata").exists()


def complete(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(step, path) for path in checkpoints.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found) if is_complete(path)]


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name tells; None for a folder of another name."""
    named = _NAME.match(folder.name)
    return int(named[1]) if named else None


def newest(checkpoints: Path) -> Path | None:
    """The newest checkpoint that can be resumed, or None."""
    return next((path for path in reversed(complete(checkpoints)) if (path / UPDATER).exists()), None)


def fault(folder: Path) -> str | None:
    """The line for a folder that `run.resume` cannot name; None for a checkpoint that can be resumed."""
    if not is_complete(folder):
        inside = newest(folder / "checkpoints") or newest(folder)
        remedy = f"its newest is run.resume={inside}" if inside else "give a folder RUN/checkpoints/step-NNNNNN, or auto"
        return f"run.resume: {folder} is no checkpoint; {remedy}"
    if not (folder / UPDATER).exists():
        return f"run.resume: {folder} was saved with checkpoint.save_only_model=true and cannot be resumed"
    return None


def resumed(resume: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that `run.resume` names; None for a fresh start."""
    if resume == "auto":
        return newest(run_dir / "checkpoints")
    return None if resume is None else Path(resume)


def start_of(resume: str | None, run_dir: Path) -> str:
    """Where the run starts, in words: `fresh, from step 0`, or `step 40 (RUN/checkpoints/step-000040)`."""
    folder = resumed(resume, run_dir)
    if folder is None:
        return "fresh, from step 0"
    step = step_of(folder)
    return str(folder) if step is None else f"step {step} ({folder})"


def set_aside(checkpoints: Path, step: int, start: Path | None) -> list[Path]:
    """Rename what another course of this run saved at `step` or later, so that neither `run.resume=auto` nor
    `checkpoint.save_total_limit` takes it for this one's. `start` is the checkpoint the run goes on from. The new names.
    """
    renamed = []
    for path in complete(checkpoints):
        if step_of(path) < step or (start is not None and path.samefile(start)):
            continue
        number = 1
        while (name := path.with_name(f"left-{number}-{path.name}")).exists():
            number += 1
        renamed.append(path.rename(name))
    return renamed

"""The options on disk: which groups there are, which names each accepts, and the line for one that does not exist."""

from __future__ import annotations

import difflib
from pathlib import Path


def conf_dir() -> Path:
    """The folder of shipped YAML: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def groups(config_dir: str | None = None) -> set[str]:
    return {p.name for folder in _folders(config_dir) for p in folder.iterdir() if p.is_dir()}


def options(group: str, config_dir: str | None = None) -> list[str]:
    """The names that `group=NAME` accepts."""
    return sorted({p.stem for folder in _folders(config_dir) for p in (folder / group).glob("*.yaml")})


def faults(group: str, names: list[str], config_dir: str | None = None) -> list[str]:
    """One line per name that is no option of the group, with the nearest one (CLI-3)."""
    known = options(group, config_dir)
    lines = []
    for name in names:
        if name in known or name == "null" or "/" in name:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"; did you mean {group}={near[0]}?" if near else ""
        lines.append(f"{group}={name} does not exist{meant} (options: {', '.join(known)})")
    return lines


def _folders(config_dir: str | None) -> list[Path]:
    return [conf_dir()] + ([Path(config_dir)] if config_dir else [])

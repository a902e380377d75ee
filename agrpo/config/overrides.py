"""Overrides as typed -> as Hydra takes them, and one line for each that it would refuse in words of its own."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from agrpo.config import choices
from agrpo.errors import ConfigError

# Extra of pyproject.toml -> the package that brings Hydra's launcher.
LAUNCHERS = {"slurm": "hydra-submitit-launcher", "joblib": "hydra-joblib-launcher"}
SLURM = "submitit_slurm"


def prepare(overrides: list[str], config_dir: str | None, multirun: bool = False) -> tuple[list[str], list[str]]:
    """Overrides in the form Hydra takes without complaint, and the faults of those left out."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder")
    parser, prepared, problems = OverridesParser.create(), [], []
    groups = choices.groups(config_dir)
    # A search path of the user's may hold options that are not visible here.
    open_ended = any(o.startswith("hydra.searchpath") for o in overrides)
    for text in overrides:
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException as error:
            problems.append(f"{text} is not an override such as key=value: {_slip(text, config_dir) or one_line(error)}")
            continue
        key = override.key_or_group
        if not key:
            problems.append(f"{text} is not an override such as key=value: {_slip(text, config_dir)}")
            continue
        if override.is_sweep_override() and not multirun:
            problems.append(
                f"{text} lists several values: add -m for one run per value, or quote a text that holds a comma: "
                f"""'{key}="{text.split("=", 1)[1]}"'"""
            )
            continue
        if key == "hydra/launcher" and (line := _launcher_fault(_chosen(override))):
            problems.append(line)
        elif key in groups and not override.is_delete():
            faults = [] if open_ended else choices.faults(key, _chosen(override), config_dir)
            problems += faults
            prepared += [] if faults else [_as_choice(text, key)]
        elif override.is_delete() or override.package is not None or "/" in key or key.split(".")[0] == "hydra":
            prepared.append(text)
        else:
            prepared.append("++" + text.lstrip("+"))
    return prepared, problems


def _slip(text: str, config_dir: str | None) -> str | None:
    """What is wrong with the form of an override, where it is one of the usual slips."""
    if text in choices.options("recipe", config_dir):
        return f"use +recipe={text}"
    if text.startswith("=") or text.endswith("="):
        return "no blanks may stand around ="
    if text.endswith(":"):
        return f"write {text[:-1]}=VALUE"
    if "=" not in text:
        return "write KEY=VALUE, without blanks around ="
    missing = [close for start, close in ("[]", "{}", "()") if text.count(start) > text.count(close)]
    return f"the closing {missing[0]} is missing" if missing else None


def _launcher_fault(names: list[str]) -> str | None:
    """Launchers beside Hydra's own are packages."""
    installed = {d.name.lower().replace("_", "-") for d in importlib.metadata.distributions() if d.name}
    for name in names:
        extra = name.partition("_")[0].replace("submitit", "slurm")
        if extra in LAUNCHERS and LAUNCHERS[extra] not in installed:
            return f"hydra/launcher={name} needs the package {LAUNCHERS[extra]}; run: pip install 'agrpo[{extra}]'"
        if name == SLURM and shutil.which("srun") is None:
            return f"hydra/launcher={name}: there is no srun here; submit from a login node of the cluster, or try the jobs here with hydra/launcher=submitit_local"
    return None


def _as_choice(text: str, group: str) -> str:
    """`recipe` alone is no part of the defaults list, so it alone is appended, whether or not the + was typed."""
    return "+" * (group == "recipe") + text.lstrip("+")


def _chosen(override: Any) -> list[str]:
    """The option names an override chooses: one, a list, or those of a sweep."""
    value = override.value()
    if override.is_sweep_override():
        return [str(v) for v in getattr(value, "list", [])]
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def shown(overrides: list[str]) -> list[str]:
    """Overrides as a user would type them."""
    return [o.removeprefix("++") for o in overrides]


def one_line(error: Exception) -> str:
    """The useful part of an error: Hydra wraps it, so the innermost cause speaks."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = str(cause) or str(error)
    key = getattr(cause, "full_key", None)
    line = " ".join(text.replace(f"full_key: {key}", "").split(" object_type=")[0].split())
    return line if not key or key in line else f"{key}: {line}"

"""The whole configuration of a run as one frozen object, and its way to disk and back.

    agrpo train OVERRIDES -> compose (Hydra, runner.py) -> read -> check (rules.py) -> <run_dir>/config.yaml -> load

Every fault of a configuration is reported together, one line each, before any process starts (CLI-4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.config import secrets
from agrpo.config.build import GROUPS, build, locate, read_component, read_section, unknown_keys
from agrpo.config.devices import Devices, detect
from agrpo.errors import ConfigError
from agrpo.lifecycle import write_atomic
from agrpo.sections import Checkpoint, Logger, Model, Optimizer, Rollout, Run

__all__ = ["Config", "Devices", "build", "check", "compose", "detect", "load", "locate", "public", "read", "save", "to_tree"]

SECTIONS = {
    "run": Run,
    "rollout": Rollout,
    "checkpoint": Checkpoint,
    "model": Model,
    "optimizer": Optimizer,
    "logger": Logger,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sections are fixed dataclasses; the others are the chosen components. Read-only; runtime facts are arguments."""

    run: Run
    rollout: Rollout
    checkpoint: Checkpoint
    model: Model
    optimizer: Optimizer
    logger: Logger
    data: Any
    env: Any
    sampler: Any
    scorer: Any
    advantage: Any
    packer: Any
    loss: Any
    sync: Any
    server: Any
    eval: dict[str, Any]  # name -> evaluation
    devices: Devices = Devices()  # of the machine that checked the configuration; not saved


def compose(overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """The composed configuration as plain values, unchecked, as `agrpo train OVERRIDES` would see it."""
    from agrpo.config.runner import compose_tree

    return compose_tree(overrides, config_dir)


def read(tree: Mapping[str, Any], devices: Devices | None = None) -> Config:
    """Build every section and component of `tree`. Raises ConfigError with all unknown keys, wrong types and ranges."""
    parts, problems = _read_parts(tree)
    if problems:
        raise ConfigError(problems)
    return Config(**parts, devices=devices or Devices())


def _read_parts(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    known = [*SECTIONS, *GROUPS, "eval"]
    problems = [line for key, value in tree.items() if key not in known for line in unknown_keys(key, known, value)]
    parts: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        parts[name], found = read_section(_read_as_null(name, tree.get(name, {})), cls, name)
        problems += found
    for name in GROUPS:
        parts[name], found = read_component(tree.get(name), name)
        problems += found
    parts["eval"] = {}
    for name, node in (tree.get("eval") or {}).items():
        parts["eval"][name], found = read_component(node, f"eval.{name}")
        problems += found
    return parts, problems


def _read_as_null(name: str, node: Any) -> Any:
    """TRL's "no limit" values of max_steps, -1 and 0, mean null."""
    if (
        name == "run"
        and isinstance(node, Mapping)
        and node.get("max_steps") in (-1, 0)
        and node["max_steps"] is not False
    ):
        return {**node, "max_steps": None}
    return node


def check(
    tree: Mapping[str, Any], devices: Devices, more: Callable[[Config], list[str]] = lambda config: []
) -> tuple[Config, list[str]]:
    """The configuration of `tree` and its warnings. Raises ConfigError with every violation that needs no server.

    `more` adds the checks of a layer above this one.
    """
    from agrpo.config import rules

    parts, problems = _read_parts(tree)
    if parts["run"] is not None and parts["run"].use_cpu:
        devices = Devices()
    if any(part is None for part in (*parts.values(), *parts["eval"].values())):
        # Rules between keys need a complete configuration; the parts that could be read are checked by themselves.
        raise ConfigError(list(dict.fromkeys(problems + rules.problems_of_parts(parts, devices))))
    config = Config(**parts, devices=devices)
    problems += rules.problems(config) + more(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config, rules.warnings(config)


def to_tree(config: Config) -> dict[str, Any]:
    """Plain values that `read` turns back into an equal configuration; secrets are left out."""
    tree = {f.name: _plain(getattr(config, f.name), f.name) for f in dataclasses.fields(config) if f.name != "devices"}
    tree["eval"] = {name: _plain(value, "", component=True) for name, value in config.eval.items()}
    tree["checkpoint"]["hub"]["token"] = None
    return tree


def _plain(value: Any, name: str = "", component: bool = False) -> Any:
    """`value` as plain containers; a component, known by the field it sits in, is stored with its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        fields = {f.name: _plain(getattr(value, f.name), f.name) for f in dataclasses.fields(value) if f.init}
        is_component = component or name in GROUPS
        return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **fields} if is_component else fields
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def save(config: Config, run_dir: Path, overrides: list[str]) -> None:
    """Write `config.yaml`: all that the processes of the run need to know, and what was typed to get it (CLI-10).

    Values whose names say that they are secret go to a file of their own, which only this user can read.
    """
    import yaml

    typed = "# agrpo train " + " ".join(public(config, overrides))
    tree = to_tree(config)
    hidden = secrets.hide(tree)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    write_atomic(Path(run_dir) / "config.yaml", f"{typed}\n{text}")
    secrets.save(hidden, Path(run_dir))


def public(config: Config, overrides: list[str]) -> list[str]:
    """The overrides without those that hold a secret, in whatever form it was typed."""
    known = [*secrets.hide(to_tree(config)).values(), config.checkpoint.hub.token]
    return [o for o in overrides if not any(secret and secret in o for secret in known)]


def load(run_dir: Path | str) -> Config:
    """The configuration of a started run, in one of its processes."""
    import yaml

    path = Path(run_dir) / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    secrets.restore(tree, Path(run_dir))
    return read(tree)

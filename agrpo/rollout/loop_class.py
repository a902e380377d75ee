"""What `rollout.loop` may name, and the settings it has: every fault is one line, before any process starts (LOOP-1)."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from agrpo.config import locate
from agrpo.config.build import read_section
from agrpo.errors import ConfigError
from agrpo.rollout.hooks import RolloutLoop

ASYNC, PLAIN = (
    ("generate_one", "generate_one_turn", "setup", "close"),
    ("filter_prompt", "compute_advantages", "state_dict", "load_state_dict"),
)


def problems(config: Any) -> list[str]:
    """What is wrong with `rollout.loop` and its settings."""
    rollout = config.rollout
    if rollout.loop is None:
        return ["rollout.loop_config needs rollout.loop"] if rollout.loop_config else []
    try:
        cls = locate(rollout.loop)
    except ConfigError as error:
        return [f"rollout.loop: {line}" for line in error.problems]
    line = _class_problem(rollout.loop, cls)
    if line:
        return [line]
    lines = _method_problems(rollout.loop, cls)
    lines += own_settings(cls, rollout.loop_config)[1]
    if rollout.workflow is not None and overrides(cls, "generate_one"):
        lines.append(
            f"rollout.workflow and {rollout.loop}.generate_one both say how a rollout is played; set rollout.workflow=null or "
            "leave generate_one out"
        )  # COMPAT-32
    if getattr(config.advantage, "needs_step", False) and overrides(cls, "compute_advantages"):
        lines.append(
            f"{rollout.loop}.compute_advantages is called before a step is known, which level batch needs; set "
            "advantage.mean_level, advantage.std_level and advantage.token_norm to group or null"
        )
    return lines


def _class_problem(path: str, cls: Any) -> str | None:
    qualified = getattr(cls, "__qualname__", "")
    if "<lambda>" in qualified or "<locals>" in qualified:
        kind = "a lambda" if "<lambda>" in qualified else "defined inside a function"
        return f"rollout.loop: {path} is {kind}; write it with class at the top level of a module"
    if not (isinstance(cls, type) and issubclass(cls, RolloutLoop)):
        return f"rollout.loop: {path} must be a subclass of agrpo.rollout.RolloutLoop, got {_kind(cls)}"
    needed = [
        p for p in inspect.signature(cls).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if needed:
        return f"rollout.loop: {path} is made without arguments, but its __init__ needs {needed[0].name}; use setup()"
    return None


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _method_problems(path: str, cls: type) -> list[str]:
    lines = []
    for name in (*ASYNC, *PLAIN):
        is_async = inspect.iscoroutinefunction(getattr(cls, name))
        if is_async != (name in ASYNC):
            lines.append(
                f"rollout.loop: {path}.{name} must be a {'coroutine: async def' if name in ASYNC else 'plain def'}"
            )
    return lines


def own_settings(cls: type, given: dict[str, Any]) -> tuple[Any, list[str]]:
    """`rollout.loop_config` as the class's own `Config`, or as it is where there is none; and the faults."""
    own = getattr(cls, "Config", None)
    if own is None:
        return given, []
    if not dataclasses.is_dataclass(own):
        return given, [f"rollout.loop: {cls.__name__}.Config must be a dataclass, got {_kind(own)}"]
    return read_section(given, own, "rollout.loop_config")


def overrides(cls: type, name: str) -> bool:
    return getattr(cls, name) is not getattr(RolloutLoop, name)

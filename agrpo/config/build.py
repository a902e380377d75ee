"""From plain values to frozen dataclasses: every key, type and range checked, every fault of a node reported at once.

`build({"_target_": "agrpo.loss.grpo.Grpo", "epsilon": "abc"}, "loss")` raises ConfigError with
`loss.epsilon must be a number, got 'abc'`. Nothing is instantiated from user input but the class that `_target_` names.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from agrpo.config.hints import answer, inside
from agrpo.errors import ConfigError
from agrpo.schema import allowed, violations

GROUPS = ("data", "env", "sampler", "scorer", "advantage", "packer", "loss", "sync", "server")

# The methods through which the loops use an option of each group (CLI-15).
INTERFACES = {
    "data": ("open",),
    "env": ("open",),
    "sampler": ("connect",),
    "scorer": ("open",),
    "advantage": ("of",),
    "packer": ("planner",),
    "loss": ("__call__",),
    "sync": ("open",),
    "server": (),
}


def build(node: Mapping[str, Any], group: str) -> Any:
    """The component that `node` describes. Raises ConfigError with one line per fault, each naming `group.key`."""
    component, problems = read_component(node, group)
    if problems:
        raise ConfigError(problems)
    return component


def read_component(node: Any, group: str) -> tuple[Any, list[str]]:
    """The component, if its class could be found, and the faults; a faulty key has its default."""
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        return None, [f"{group} must name its class in {group}._target_, got {_show(node)}"]
    try:
        cls = locate(node["_target_"])
    except ConfigError as error:
        return None, [f"{group}._target_: {line}" for line in error.problems]
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return None, [f"{group}._target_: {node['_target_']} is not a dataclass; a component's fields are its settings"]
    name = group.rsplit(".", 1)[-1]
    missing = [m for m in INTERFACES.get(name, ()) if not callable(getattr(cls, m, None))]
    if missing:
        return None, [
            f"{group}._target_: {node['_target_']} lacks the method(s) {', '.join(missing)} of the group {name}"
        ]
    return read_section({k: v for k, v in node.items() if k != "_target_"}, cls, group)


def read_section(node: Any, cls: type, prefix: str) -> tuple[Any, list[str]]:
    """An instance of dataclass `cls` from a mapping, and the faults. A faulty key has its default in the instance, so that
    rules between keys can still be checked; without a required key there is no instance."""
    if not isinstance(node, Mapping):
        return None, [f"{prefix} must be a mapping of its keys, got {_show(node)}"]
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values, problems, faulty, missing = {}, [], set(), False
    for key, value in node.items():
        if key not in fields:
            problems += unknown_keys(f"{prefix}.{key}", [f"{prefix}.{f}" for f in fields], value)
        else:
            values[key], found = _value(value, hints[key], f"{prefix}.{key}")
            if found and fields[key].metadata.get("choices"):
                found = [f"{prefix}.{key} must be {allowed(fields[key])}, got {_show(value)}"]
            elif isinstance(value, bool) and fields[key].metadata.get("doc"):
                # Text that is taken for a switch: its meaning tells the words that are allowed.
                found = [f"{line}: {fields[key].metadata['doc']}" if " must be text" in line else line for line in found]
            problems += found
            faulty |= {key} if found else set()
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and (name not in node or node[name] in (None, "???")):
            problems = [p for p in problems if not p.startswith(f"{prefix}.{name} must be")]
            problems.append(f"{prefix}.{name} is required: {field.metadata.get('doc', '')}; give {prefix}.{name}=VALUE")
            values[name], missing = None, True
            faulty.discard(name)
    # Faulty keys keep their default here, so that the ranges of the others are still checked: all faults at once.
    values = {k: v for k, v in values.items() if k not in faulty}
    try:
        instance = cls(**values)
    except (ValueError, TypeError) as error:
        return None, problems or [f"{prefix}: {error}"]
    outside = violations(instance, prefix)
    return None if missing else _with_defaults(instance, outside, prefix), problems + outside


def _with_defaults(instance: Any, outside: list[str], prefix: str) -> Any:
    """The instance with the default of each field that a line of `outside` is about."""
    names = {line.removeprefix(f"{prefix}.").split(" ", 1)[0].split(".", 1)[0] for line in outside}
    defaults = {}
    for field in dataclasses.fields(instance):
        if field.name in names and field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.name in names and field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return dataclasses.replace(instance, **defaults)


def unknown_keys(key: str, known: list[str], value: Any = None) -> list[str]:
    """The lines for a key that does not exist: its name here if it is another system's, else the nearest key (CLI-3).

    A section of another system, such as AReaL's `actor`, is answered option by option.
    """
    told = answer(key, value)
    if told:
        return [told]
    options = inside(key, value)
    if any(line for _, line in options):
        return [line or f"{name} is not a key of agrpo; agrpo train --cfg job lists every key" for name, line in options]
    return [_nearest(key, known)]


def _nearest(key: str, known: list[str]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(leaf, [k.rsplit(".", 1)[-1] for k in known], n=1, cutoff=0.6)
    full = [k for k in known if near and k.rsplit(".", 1)[-1] == near[0]]
    if full:
        return f"{key} is not a key; did you mean {full[0]}?"
    prefix = key.rsplit(".", 1)[0] if "." in key else ""
    place = f"keys of {prefix}" if prefix else "top-level keys"
    return f"{key} is not a key; {place}: {', '.join(sorted(k.rsplit('.', 1)[-1] for k in known))}"


def locate(path: str) -> Any:
    """The object at an import path such as `pkg.module.Class`. Raises ConfigError naming the path and the reason."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{path} is not an import path such as package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        line = f"{path} cannot be imported ({type(error).__name__}: {error})"
        is_first_missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]
        raise ConfigError(line + ("; is its folder on PYTHONPATH?" if is_first_missing else "")) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        raise ConfigError(
            f"{path}: module {module_name} has no {name}" + (f"; did you mean {near[0]}?" if near else "")
        )
    return getattr(module, name)


def _value(value: Any, hint: Any, key: str) -> tuple[Any, list[str]]:
    """`value` in the form the type `hint` asks for, and the faults found."""
    if hint is Any or hint is object:
        leaf = key.rsplit(".", 1)[-1]
        if leaf in GROUPS and isinstance(value, Mapping) and "_target_" in value:
            return read_component(value, key)
        return value, []
    if dataclasses.is_dataclass(hint):
        return read_section(value, hint, key)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(value, arguments, key)
    if origin in (list, tuple) or hint in (list, tuple):
        return _sequence(value, origin or hint, arguments, key)
    if origin is dict or hint is dict:
        return _mapping(value, arguments, key)
    return _scalar(value, hint, key)


def _union(value: Any, hints: tuple, key: str) -> tuple[Any, list[str]]:
    if value is None and type(None) in hints:
        return None, []
    choices = [h for h in hints if h is not type(None)]
    if type(value) in choices:
        return value, []
    for hint in choices:
        result, problems = _value(value, hint, key)
        if not problems:
            return result, []
        # A mapping or list that fits a choice's shape is judged by that choice: its message is the useful one.
        if isinstance(value, Mapping | list) and not any(p.startswith(f"{key} must be") for p in problems):
            return None, problems
    wanted = " or ".join([_words(h) for h in choices] + (["null"] if type(None) in hints else []))
    return None, [f"{key} must be {wanted}, got {_show(value)}"]


def _sequence(value: Any, kind: type, arguments: tuple, key: str) -> tuple[Any, list[str]]:
    if not isinstance(value, list | tuple):
        return None, [f"{key} must be a list, got {_show(value)}"]
    hints = [a for a in arguments if a is not Ellipsis] or [Any]
    if kind is tuple and len(hints) > 1 and len(hints) != len(value):
        return None, [f"{key} must be a list of {len(hints)} values, got {_show(value)}"]
    results, problems = [], []
    for index, item in enumerate(value):
        hint = hints[index] if kind is tuple and len(hints) > 1 else hints[0]
        result, found = _value(item, hint, f"{key}[{index}]")
        results.append(result)
        problems += found
    return kind(results), problems


def _mapping(value: Any, arguments: tuple, key: str) -> tuple[Any, list[str]]:
    if not isinstance(value, Mapping):
        return None, [f"{key} must be a mapping, got {_show(value)}"]
    key_hint, value_hint = arguments or (Any, Any)
    results, problems = {}, []
    for name, item in value.items():
        results[name], found = _value(item, value_hint, f"{key}.{name}")
        problems += found
        if key_hint is str and not isinstance(name, str):
            problems.append(f"{key} must have names as keys, got {_show(name)}")
    return results, problems


def _scalar(value: Any, hint: type, key: str) -> tuple[Any, list[str]]:
    fault = [f"{key} must be {_words(hint)}, got {_show(value)}"]
    if hint is bool:
        return (value, []) if isinstance(value, bool) else (None, fault)
    if isinstance(value, bool) or value is None:
        return None, fault
    if hint in (int, float):
        number = _number(value)
        if number is None or (hint is int and number != int(number)):
            return None, fault
        return hint(number), []
    if hint is str:
        # `run_name=123` means the text 123.
        return (str(value), []) if isinstance(value, str | int | float) else (None, fault)
    return (value, []) if isinstance(value, hint) else (None, fault)


def _number(value: Any) -> int | float | None:
    """The finite number that `value` is or spells ("1e-6" included), else None."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _words(hint: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Any: "anything"}
    kind = typing.get_origin(hint) or hint
    return (
        names.get(kind)
        or {list: "a list", tuple: "a list", dict: "a mapping"}.get(kind)
        or getattr(kind, "__name__", str(kind))
    )


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)

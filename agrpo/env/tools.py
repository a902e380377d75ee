"""Functions that the model may call: what they must state, and how the model sees them.

`def add(a: int, b: int) -> int` with a docstring that describes a, b and the result becomes the schema
{"type": "function", "function": {"name": "add", "description": ..., "parameters": {"properties": {"a": ...}}}}.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agrpo.config import locate
from agrpo.errors import ConfigError

RESERVED = ("reset", "get_reward")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$", re.M)


class BadArguments(ValueError):
    """The arguments of a call do not fit the tool; the text tells the model what does not."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One callable under the name the model uses."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]  # as chat templates take it
    hints: dict[str, Any] = field(
        default_factory=dict
    )  # parameter -> type; those that msgspec cannot check are left out
    required: frozenset[str] = frozenset()

    def fit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the types of the signature: "7" for an int is 7 (TOOL-9). BadArguments names what does not fit."""
        known = self.schema["function"]["parameters"].get("properties", {})
        unknown = [name for name in arguments if name not in known]
        if unknown:
            raise BadArguments(f"{self.name} has no argument {unknown[0]}; it takes {', '.join(known) or 'none'}")
        missing = sorted(self.required - set(arguments))
        if missing:
            raise BadArguments(f"{self.name} needs the argument {missing[0]}")
        return {name: self._value(name, value, known[name]) for name, value in arguments.items()}

    def _value(self, name: str, value: Any, schema: Mapping[str, Any]) -> Any:
        if isinstance(value, str) and schema.get("type") in ("array", "object"):
            try:  # formats without types write every value as text
                value = json.loads(value)
            except ValueError:
                pass
        if name not in self.hints:
            return value
        try:
            return msgspec.convert(value, self.hints[name], strict=not isinstance(value, str))
        except msgspec.ValidationError as error:
            raise BadArguments(f"argument {name} of {self.name}: {error}") from error


def tool_of(function: Callable[..., Any], label: str) -> Tool:
    """The tool that a function is; ConfigError with one line per missing part, each beginning with `label` (TOOL-1)."""
    lines = [f"{label} {fault}" for fault in faults(function)]
    if lines:
        raise ConfigError(lines)
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ConfigError(f"{label}: no schema can be made of it: {error}".replace("\n", " ")) from error
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return Tool(
        name=function.__name__,
        function=function,
        schema=schema,
        hints={name: hints[name] for name in parameters if _is_checkable(hints[name])},
        required=frozenset(n for n, p in parameters.items() if p.default is inspect.Parameter.empty),
    )


def faults(function: Callable[..., Any]) -> list[str]:
    """What a tool lacks, in words that follow its name; empty if nothing."""
    try:
        hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    except (TypeError, ValueError, NameError) as error:
        return [f"has a signature that cannot be read: {error}"]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    lines = [
        f"takes {p}; name each parameter, for a model calls by name" for p in parameters.values() if p.kind in kinds
    ]
    bare = [n for n in parameters if n not in hints]
    if bare:
        lines.append(f"has no type hint on its {_named(bare)}; write {bare[0]}: TYPE")
    if "return" not in hints:
        lines.append("has no type hint on its return value; write -> TYPE")
    return lines + _docstring_faults(inspect.getdoc(function), list(parameters), hints.get("return"))


def _docstring_faults(text: str | None, parameters: list[str], returned: Any) -> list[str]:
    if not text or not text.strip():
        return ["has no docstring; say what it does, with the sections Args: and Returns: (Google style)"]
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = [] if parts[0].strip() else ["has a docstring that does not say what it does; begin with one sentence"]
    described = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    missing = [n for n in parameters if not re.search(rf"^\s*{re.escape(n)}\s*(\([^)]*\))?\s*:\s*\S", described, re.M)]
    if missing:
        lines.append(f"has no description of its {_named(missing)}; add a line '{missing[0]}: ...' under Args:")
    if returned is not type(None) and not sections.get("Returns", "").strip():
        lines.append("does not describe its result; add the section Returns:")
    return lines


def _named(parameters: list[str]) -> str:
    return f"parameter{'s' * (len(parameters) > 1)} {', '.join(parameters)}"


def _is_checkable(hint: Any) -> bool:
    try:
        msgspec.convert(None, hint)
    except msgspec.ValidationError:
        return True
    except Exception:
        return False
    return True


def function_at(path: str, key: str) -> Tool:
    """The tool at an import path; ConfigError with lines that begin with the configuration's `key`."""
    try:
        function = locate(path)
    except ConfigError as error:
        raise ConfigError([f"{key}: {line}" for line in error.problems]) from error
    if not inspect.isfunction(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ConfigError(f"{key}: {path} is {kind}; a tool is a function defined in a module")
    if function.__name__ == "<lambda>" or "<locals>" in function.__qualname__:
        kind = "a lambda" if function.__name__ == "<lambda>" else "defined inside another function"
        raise ConfigError(f"{key}: {path} is {kind}; write it with def in a module, so that it has a name of its own")
    return tool_of(function, f"{key}: {path}")


def methods_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment class without `self`, in alphabetical order, those reserved left out (ENV-2)."""
    found = {}
    for name in dir(cls):
        raw = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in RESERVED:
            continue
        if isinstance(raw, staticmethod | classmethod):
            found[name] = getattr(cls, name)
        elif inspect.isfunction(raw):
            # Bound to the class only to take `self` off the signature; a rollout calls the method of its own instance.
            found[name] = raw.__get__(cls)
    return found


def as_text(result: Any) -> str:
    """What the model reads of a result: text as it is, containers as JSON, anything else as `str` writes it (TOOL-6)."""
    if isinstance(result, str):
        return result
    if _holds_image(result):
        raise TypeError("the result is an image; a tool must return text, numbers, lists or mappings")
    if isinstance(result, dict | list | tuple):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _holds_image(result: Any) -> bool:
    if isinstance(result, list | tuple):
        return any(_holds_image(item) for item in result)
    if isinstance(result, dict):
        return result.get("type") in ("image", "image_url", "input_image") or any(map(_holds_image, result.values()))
    return type(result).__module__.partition(".")[0] == "PIL" or isinstance(result, bytes | bytearray)

"""Entries of `scorer.functions` -> callables, with one line per entry that cannot be used (REW-9 to REW-13).

Standard library only, because every worker resolves its entries again.
"""

from __future__ import annotations

import difflib
import dis
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agrpo.scorer.contract import STANDARD

Entry = str | Mapping[str, Any]
TARGET = "_target_"


class EntryError(Exception):
    """One line: the entry, what is wrong with it, the way out."""


def needs(module: str, install: str) -> Callable[[Callable], Callable]:
    """Mark a reward function as needing an optional package, so that its absence is found before the run (CLI-16)."""

    def mark(function: Callable) -> Callable:
        function.needs = (module, install)  # type: ignore[attr-defined]
        return function

    return mark


def resolve(entry: Entry) -> Callable:
    """The callable of one entry: a function, a partial of it, or an instance of a class; EntryError otherwise."""
    path, arguments = _parts(entry)
    target = _import(path)
    shown = f"scorer.functions: {path}"
    if isinstance(target, type):
        if not isinstance(entry, Mapping):
            raise EntryError(f"{shown} is a class; write {{{TARGET}: {path}, <arguments>}} to use an instance of it")
        target = _instance(path, target, arguments)
    elif arguments:
        target = functools.partial(target, **arguments)
    if any(base.__module__.startswith("torch.nn.") for base in type(target).__mro__):
        raise EntryError(f"{shown} is a model; {_SERVE}")
    if not callable(target):
        raise EntryError(f"{shown} is not callable ({type(target).__name__}); give a function")
    _refuse_unnamed(path, target)
    return target


_SERVE = "reward models are not loaded; serve the model on its own and call it over HTTP from a function"


def _parts(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, Mapping):
        if not isinstance(entry.get(TARGET), str):
            raise EntryError(
                f"scorer.functions: entry {dict(entry)!r} has no {TARGET}; write {{{TARGET}: pkg.mod.name, <arguments>}}"
            )
        arguments = {str(k): v for k, v in entry.items() if k not in (TARGET, "_partial_")}
        return entry[TARGET], arguments
    if not isinstance(entry, str):
        raise EntryError(
            f"scorer.functions: entry {entry!r} is {type(entry).__name__}; give an import path pkg.mod.name"
        )
    return entry, {}


def _import(path: str) -> Any:
    shown = f"scorer.functions: {path}"
    if "/" in path:
        raise EntryError(f"{shown} looks like a model; {_SERVE}")
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise EntryError(f"{shown} is not an import path; give pkg.mod.name, the full name of a function in a module")
    module, rest = _longest_module(shown, parts)
    target: Any = module
    for name in rest:
        if not hasattr(target, name):
            near = difflib.get_close_matches(name, dir(target), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            where = getattr(target, "__name__", type(target).__name__)
            raise EntryError(f"{shown} cannot be imported: {where} has no {name!r}{hint}")
        target = getattr(target, name)
    return target


def _longest_module(shown: str, parts: list[str]) -> tuple[Any, list[str]]:
    """Import the module part of a path: pkg.mod.Class.method gives module pkg.mod and the rest Class, method."""
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if length == 1 or not (name == missing or name.startswith(missing + ".")):
                raise EntryError(f"{shown} cannot be imported: {error}; is its folder on PYTHONPATH?") from error
        except Exception as error:  # the user's module raised: its error is the message
            raise EntryError(f"{shown} cannot be imported: {name} raised {type(error).__name__}: {error}") from error
    raise AssertionError("unreachable: the first part is always tried")


def _instance(path: str, target: type, arguments: dict[str, Any]) -> Any:
    lost = _lost_arguments(target, arguments)
    if lost:
        raise EntryError(f"scorer.functions: {path} has no parameter " + "; ".join(lost))
    try:
        return target(**arguments)
    except Exception as error:  # the user's constructor raised: its error is the message
        raise EntryError(f"scorer.functions: {path} cannot be built: {type(error).__name__}: {error}") from error


def _lost_arguments(target: type, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments that end in a `**rest` which no constructor reads, each with what may be meant.

    One that reads its rest may hand it on or keep it, so what it does with a name is not known here.
    """
    known: set[str] = set()
    constructors = [vars(cls)["__init__"] for cls in target.__mro__ if inspect.isfunction(vars(cls).get("__init__"))]
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters.values()
        known |= {p.name for p in [*parameters][1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        if rest is None:
            return []  # Python itself refuses what is left
        if not _reads(constructor, rest):
            return [_meant(name, sorted(known)) for name in sorted(set(arguments) - known)]
    return []


def _reads(function: Callable, variable: str) -> bool:
    """Whether a function uses one of its own variables, by its name or through locals()."""
    code = function.__code__
    used = (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD"))
    return variable in code.co_cellvars or "locals" in code.co_names or any(variable in (u if isinstance(u, tuple) else (u,)) for u in used)


def _meant(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name}; " + (f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}")


def _refuse_unnamed(path: str, target: Any) -> None:
    function = _unwrapped(target)
    qualified = getattr(function, "__qualname__", type(function).__qualname__)
    if getattr(function, "__name__", "") == "<lambda>" or "<locals>" in qualified:
        kind = "a lambda" if qualified.endswith("<lambda>") else f"local ({qualified})"
        raise EntryError(f"scorer.functions: {path} is {kind}; give a function defined with def at the top of a module")


def _unwrapped(target: Any) -> Any:
    while isinstance(target, functools.partial):
        target = target.func
    return target


def is_async(target: Callable) -> bool:
    function = _unwrapped(target)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def names(targets: Sequence[Callable], taken: Sequence[str] = ()) -> list[str]:
    """Metric names: f, f and an instance of C give f, f_2, C; `taken` are names of other reward sources (REW-9)."""
    used, result = set(taken), []
    for target in targets:
        function = _unwrapped(target)
        base = getattr(function, "__name__", type(function).__name__)
        name, number = base, 2
        while name in used:
            name, number = f"{base}_{number}", number + 1
        used.add(name)
        result.append(name)
    return result


def usage_problems(path: str, target: Callable, columns: Sequence[str] | None) -> list[str]:
    """Missing package, or a signature that the call of REW-2 does not fit; `columns` None = not known yet."""
    shown = f"scorer.functions: {path}"
    module, install = getattr(_unwrapped(target), "needs", (None, ""))
    if module and importlib.util.find_spec(module) is None:
        return [f"{shown} needs the package {module}, which is not installed; run: {install}"]
    unknown = _unknown_arguments(shown, target)
    if unknown:
        return unknown
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-ins tell no signature
        return []
    return _signature_problems(shown, parameters, columns)


def _unknown_arguments(shown: str, target: Callable) -> list[str]:
    """Configured arguments that are no named parameter: `**columns` would take a misspelt one without a word."""
    if not isinstance(target, functools.partial):
        return []
    try:
        parameters = inspect.signature(target.func).parameters.values()
    except (TypeError, ValueError):
        return []
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in STANDARD]
    return [f"{shown} has no parameter {_meant(name, known)}" for name in sorted(set(target.keywords) - set(known))]


def _signature_problems(
    shown: str, parameters: Mapping[str, inspect.Parameter], columns: Sequence[str] | None
) -> list[str]:
    lines = []
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if by_position:
        lines.append(f"{shown} takes {', '.join(by_position)} by position only; all arguments are passed by keyword")
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    passed = {*STANDARD, *(columns or ())} - {"prompt", "completion"}
    if columns is not None:
        for name in [p.name for p in named if p.default is p.empty and p.name not in passed]:
            found = ", ".join(c for c in columns if c not in ("prompt", "completion")) or "none"
            lines.append(
                f"{shown} requires `{name}`, which is neither a standard argument ({', '.join(STANDARD)}) nor a data column "
                f"({found}); rename the parameter or the column, or give it a default"
            )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        refused = sorted(passed - {p.name for p in named})
        if refused:
            lines.append(
                f"{shown} does not accept {', '.join(refused)}; every argument and column is passed, add **columns to it"
            )
    return lines

"""What a model's config.json leaves unsaid: the defaults of its class in the installed transformers, read as source text.

Importing transformers takes seconds and torch; its configuration classes state their defaults as plain literals.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TIED = "tie_word_embeddings"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of config.json over its class's defaults; whether the head is tied is said by the whole model's."""
    own = config.get("text_config")
    if not own:
        return _over(_defaults(config.get("model_type")), config)
    whole = config.get("model_type") or ""
    text = _over(_defaults(own.get("model_type") or f"{whole}_text"), own)
    said = next((part[_TIED] for part in (config, own, _defaults(whole)) if part.get(_TIED) is not None), None)
    return text if said is None else {**text, _TIED: said}


def _over(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over the defaults; a field that has two names is given under either."""
    pairs = defaults.get("attribute_map") or {}
    given = {name for pair in pairs.items() if any(n in own for n in pair) for name in pair}
    return {**{k: v for k, v in defaults.items() if k not in given}, **own}


def _defaults(model_type: str | None) -> dict[str, Any]:
    """Literal defaults of the configuration class with this `model_type`; empty where transformers has none."""
    for source in _sources(model_type or ""):
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                values = dict(_values(node))
                if values.pop("model_type", None) == model_type:
                    return values
    return {}


def _sources(model_type: str) -> Iterator[str]:
    """Source of the package that defines a model type: of its own name, or that of the family it is a part of."""
    found = importlib.util.find_spec("transformers")  # does not import it
    parts = model_type.replace("-", "_").split("_")
    if found is None or not all(part.isalnum() for part in parts):
        return
    for size in range(len(parts), 0, -1):
        name = "_".join(parts[:size])
        file = Path(found.submodule_search_locations[0], "models", name, f"configuration_{name}.py")
        if file.is_file():
            yield file.read_text(encoding="utf-8")


def _values(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Fields of the class with literal values, and of `__init__` its arguments' defaults, in which older versions state them."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield from _literal(statement.target.id, statement.value)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield from _literal(statement.targets[0].id, statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
            pairs = [*zip(named, arguments.defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
            for argument, default in pairs:
                yield from _literal(argument.arg, default)


def _literal(name: str, value: ast.expr | None) -> Iterator[tuple[str, Any]]:
    try:
        yield name, ast.literal_eval(value)
    except (ValueError, TypeError):
        return  # computed: not known without importing

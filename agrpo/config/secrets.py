"""Values of a configuration that must not be shown: API keys, tokens, passwords, known by their names.

`config.yaml` has MASK in their place. The processes of the run read them from `state/secrets.json`, which only the user who
started the run can read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agrpo.lifecycle import write_atomic

MASK = "***"
NAMES = re.compile(
    r"(^|[_-])(api_?key|access_?key|private_?key|auth|authorization|token|password|passwd|secret|credentials?)$", re.I
)


def hide(tree: Any) -> dict[str, str]:
    """Mask every secret in `tree`; what was there, by place."""
    hidden = {}
    for place, holder, name in list(_secrets(tree, "")):
        hidden[place], holder[name] = holder[name], MASK
    return hidden


def _secrets(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        at = f"{place}/{name}"
        if isinstance(value, dict | list):
            yield from _secrets(value, at)
        elif isinstance(node, dict) and isinstance(value, str) and value and NAMES.search(str(name)):
            yield at, node, name


def save(hidden: dict[str, str], run_dir: Path) -> None:
    path = _file(run_dir)
    if hidden:
        write_atomic(path, json.dumps(hidden), mode=0o600)
    else:
        path.unlink(missing_ok=True)


def restore(tree: Any, run_dir: Path) -> None:
    """Put the secrets back where they were."""
    path = _file(run_dir)
    hidden = json.loads(path.read_text()) if path.exists() else {}
    for place, holder, name in list(_secrets(tree, "")):
        holder[name] = hidden.get(place, holder[name])


def _file(run_dir: Path) -> Path:
    return run_dir / "state" / "secrets.json"

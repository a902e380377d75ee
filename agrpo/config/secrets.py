"""Values of a configuration that must not be shown: API keys, tokens and passwords, known by the name of their setting, by the
option before them in a list of arguments, or by their place in an address.

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
    r"(^|[_-]|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
    r"((api|access|private|secret)[_-]?key|auth|authorization|token|bearer|password|passwd|pwd|passphrase|secret|credentials?|cookie)$",
    re.I,
)
IN_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@", re.I)  # a password before the host


def hide(tree: Any) -> dict[str, str]:
    """Mask every secret in `tree`; what was there, by place."""
    hidden = {}
    for place, holder, name, before in list(_texts(tree, "")):
        value = holder[name]
        option, is_joined, _ = value.partition("=")
        if is_joined and _is_option(option):
            hidden[place], holder[name] = value, f"{option}={MASK}"
        elif NAMES.search(str(name)) or _is_option(before) or IN_ADDRESS.match(value):
            hidden[place], holder[name] = value, MASK
    return hidden


def _is_option(text: str) -> bool:
    """Whether this argument of a command line, such as --hf-token, is followed by a secret."""
    return text.startswith("--") and NAMES.search(text) is not None


def _texts(node: Any, place: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Each text that is not empty: its place, what holds it and under which name, and the text before it in a list."""
    items, before = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else (), ""
    for name, value in items:
        if isinstance(value, dict | list):
            yield from _texts(value, f"{place}/{name}")
        elif isinstance(value, str) and value:
            yield f"{place}/{name}", node, name, before
        before = value if isinstance(node, list) and isinstance(value, str) else ""


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
    for place, holder, name, _ in list(_texts(tree, "")):
        holder[name] = hidden.get(place, holder[name])


def _file(run_dir: Path) -> Path:
    return run_dir / "state" / "secrets.json"

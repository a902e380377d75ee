"""`python -m agrpo.config.reference`: the reference pages, made from the declarations so that they cannot go stale."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agrpo.config import SECTIONS
from agrpo.config.build import locate
from agrpo.config.choices import conf_dir
from agrpo.schema import allowed

_KEYS_HEAD = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]


def configuration() -> str:
    """`docs/configuration.md`: every key of every section and of every option of every group."""
    lines = [
        "# Configuration",
        "",
        "Made from the code by `python -m agrpo.config.reference docs`. A key is set on the command line as `key=value`; a",
        "group's option as `group=option`. `agrpo train --cfg job` prints the composed configuration.",
    ]
    for name, cls in SECTIONS.items():
        lines += ["", f"## {name}", "", *_KEYS_HEAD, *_rows(cls, name)]
    for group, options in _components().items():
        lines += ["", f"## {group}", "", f"Options: {', '.join(f'`{group}={option}`' for option in options)}."]
        for option, cls in options.items():
            lines += ["", f"### {group}={option}", "", f"{_sentence(cls)} Class `{cls.__module__}.{cls.__qualname__}`."]
            rows = list(_rows(cls, group))
            lines += ["", *_KEYS_HEAD, *rows] if rows else ["", "No keys."]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """`docs/metrics.md`: every metric of `metrics.jsonl`."""
    from agrpo.metrics.names import table_markdown

    return (
        "# Metrics\n\n"
        "Made from the code by `python -m agrpo.config.reference docs`. Each line of `metrics.jsonl` is one logging window:\n"
        "`step` and the metrics that had events in it. *By*: W rollout process, F feeder on rank 0, L loss on all ranks, T\n"
        "training loop. *Window*: ratio = sum of numerators over sum of denominators of all events.\n\n"
        + table_markdown()
    )


def _components() -> dict[str, dict[str, type]]:
    """Group -> option -> class, for every YAML that names one; evaluations are configured by name under `eval`."""
    import yaml

    found: dict[str, dict[str, type]] = {}
    for path in sorted(conf_dir().glob("*/*.yaml")):
        target = (yaml.safe_load(path.read_text()) or {}).get("_target_")
        if target is not None:
            found.setdefault(path.parent.name, {})[path.stem] = locate(target)
    found["eval.NAME"] = {"evaluation": locate("agrpo.eval.Evaluation")}
    return found


def _rows(cls: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], f"{prefix}.{field.name}"
        if dataclasses.is_dataclass(hint):
            yield from _rows(hint, key)
            continue
        cells = [f"`{key}`", _type(hint), _default(field), allowed(field), field.metadata.get("doc", "")]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return text.replace("typing.", "").replace("NoneType", "None").replace("None", "null")


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default) if not isinstance(field.default, str) else field.default or "''"
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    return "required"


def _sentence(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (Path(sys.argv[1]) / page).write_text(make())

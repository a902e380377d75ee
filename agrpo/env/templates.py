"""Training templates of model families whose own chat template rewrites history when a tool result is appended (TURN-11).

They are used for sampler rendering only; the saved tokenizer keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_BAR, _LOW = "\uff5c", "\u2581"


@dataclass(frozen=True, slots=True)
class Patch:
    """How to turn the template of a family into one that keeps what it has rendered.

    Without a `replacement` the whole template is exchanged for the file `family`.jinja beside this one.
    """

    family: str
    fragment: str  # text by which a template of the family is known
    replacement: str | None = None


PATCHES = (
    # The reasoning block of the last message only: an assistant message loses it when a tool result follows.
    Patch("qwen3", "{%- if loop.last or (not loop.last and reasoning_content) %}", "{%- if true %}"),
    # No tool schemas, and from the second round of calls on no marks around them.
    Patch("deepseek_v3", f"<{_BAR}tool{_LOW}calls{_LOW}begin{_BAR}>"),
)


def training_template(template: str) -> tuple[str, str] | None:
    """(family, its training template) of a known family; None for any other template."""
    for patch in PATCHES:
        if patch.fragment not in template:
            continue
        if patch.replacement is not None:
            return patch.family, template.replace(patch.fragment, patch.replacement)
        return patch.family, (Path(__file__).parent / f"{patch.family}.jinja").read_text(encoding="utf-8")
    return None

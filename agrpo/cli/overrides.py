"""What the commands that take overrides have in common: their arguments, and what a key typed as an option is told."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Overrides = Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES", show_default=False)]
ConfigDir = Annotated[str | None, typer.Option(help="Folder with more YAML: DIR/loss/mine.yaml is loss=mine.")]


class OverridesCommand(TyperCommand):
    """A command whose keys are typed without dashes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        for position, word in enumerate(args):
            name, _, value = word.partition("=")
            if name == "--":
                break
            if name.startswith("--") and name not in known:
                following = args[position + 1] if position + 1 < len(args) else ""
                line = _meant(name[2:], value or ("" if following.startswith("-") else following))
                if line is not None:
                    raise typer.BadParameter(line)
        return super().parse_args(ctx, args)


def _meant(name: str, value: str) -> str | None:
    """The line for an option that is none: a key of agrpo or of another system; None for any other."""
    from agrpo.config import choices, hints

    if name == "recipe":
        return f"a recipe is chosen with +recipe={value or 'NAME'}, without dashes"
    if name.split(".")[0] in choices.groups() | {"run", "rollout", "checkpoint"}:
        return f"keys are given without dashes: {name}={value or 'VALUE'}"
    return hints.answer(name.replace("-", "_"), value or None)

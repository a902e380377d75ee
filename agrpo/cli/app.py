"""The application, and how each of its commands ends."""

from __future__ import annotations

from typing import Annotated

import typer

from agrpo import __version__
from agrpo.errors import AgrpoError, ConfigError

app = typer.Typer(
    name="agrpo",
    help="Asynchronous GRPO for language models: generation and training overlap, from one command.",
    epilog="Start with: agrpo train +recipe=quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"agrpo {__version__}")
        raise typer.Exit


def leave_with(run: object) -> None:
    """Call `run` and turn how it ends into lines on stderr and an exit code (CLI-11)."""
    from agrpo.metrics.output import say

    try:
        run()
    except AgrpoError as error:
        lines = error.problems if isinstance(error, ConfigError) else [str(error)]
        for line in lines:
            say(line)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(getattr(interrupt, "exit_code", 130)) from None

"""The command line: parse, call one function, print an error in one line. Nothing heavy is imported early."""

import gc

from agrpo.cli import configured, runs
from agrpo.cli.app import app

__all__ = ["app", "configured", "main", "runs"]


def main() -> None:
    try:
        app()
    finally:
        gc.freeze()  # as in agrpo.lifecycle: the end looks through everything otherwise

"""Text for whoever watches a run, who may go at any time: a closed pipe, a lost terminal or a full disk ends no run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class Unfailing:
    """A text stream that drops everything after its first failed write; `name` is what a warning calls it."""

    def __init__(self, file: TextIO, name: str = ""):
        self._file, self._name, self._is_well = file, name, True

    def write(self, text: str) -> int:
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, call: Any) -> None:
        if not self._is_well:
            return
        try:
            call()
        except OSError as error:
            self._give_up(error)
        except ValueError:
            if not self._file.closed:
                raise
            self._is_well = False

    def _give_up(self, error: OSError) -> None:
        self._is_well = False
        # What is buffered is written once more as the interpreter ends, and a failure there would change the exit code.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._file.fileno())
            finally:
                os.close(nowhere)
        if self._name:
            say(f"warning: nothing more is written to {self._name}: {os.strerror(error.errno or 0)}; the run goes on")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def say(text: str) -> None:
    """A line on stderr, where anybody reads it."""
    print(text, file=Unfailing(sys.stderr), flush=True)

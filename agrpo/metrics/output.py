"""Text for whoever watches a run, who may go at any time, or stop reading: a closed pipe, a lost or a halted terminal or a
full disk ends no run, and holds none up."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from typing import Any, TextIO

HELD_UP_S = 1.0  # that the first text waits for a reader who has stopped; those after it wait no more
LOOK_S = 0.01


class Unfailing:
    """A text stream that drops everything after its first failed write, and what comes while nobody takes it; `name` is what a
    warning calls it."""

    def __init__(self, file: TextIO, name: str = ""):
        self._file, self._name, self._is_well = file, name, True
        self._num_left_out = 0  # writes, since it was last read
        self._waits = _waits_for_a_reader(file)

    def write(self, text: str) -> int:
        self._try(lambda: self._put(text) if self._waits else self._file.write(text))
        return len(text)

    def flush(self) -> None:
        if not self._waits:
            self._try(self._file.flush)

    def _put(self, text: str) -> None:
        """Write at once, past the stream's buffer, which would be waited for as the interpreter ends."""
        if self._num_left_out:
            text = f"\n({self._num_left_out} writes were left out: nobody read them)\n{text}"
        data = text.encode(self._file.encoding or "utf-8", "replace")
        deadline = time.monotonic() + (0.0 if self._num_left_out else HELD_UP_S)
        # Opened anew: not to block is then a property of this way to the reader, and of nobody else's.
        try:
            way = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) if error.errno == errno.ENXIO else error from None
        try:
            while data:
                try:
                    data = data[os.write(way, data) :]
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        self._num_left_out += 1
                        return
                    time.sleep(LOOK_S)
            self._num_left_out = 0
        finally:
            os.close(way)

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


def _waits_for_a_reader(file: TextIO) -> bool:
    """Whether this is a pipe or a terminal, which takes no more once its reader has stopped, and can be opened anew."""
    try:
        number = file.fileno()
        file.flush()
        return (stat.S_ISFIFO(os.fstat(number).st_mode) or file.isatty()) and os.access(f"/proc/self/fd/{number}", os.W_OK)
    except (OSError, ValueError, AttributeError):
        return False


def say(text: str) -> None:
    """A line on stderr, where anybody reads it."""
    print(text, file=Unfailing(sys.stderr), flush=True)

"""A sink that may fail or hang: a service that does not answer costs records of its own, never a step."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from agrpo.errors import ConfigError

log = logging.getLogger(__name__)

START_S = 120.0  # for a service to take the run
CLOSE_S = 60.0  # for what is still to be written at the end
MOST_WAITING = 100  # records
_END = (0, None)


class Background:
    """One sink, built, written to and closed in a thread of its own, as libraries that keep to one thread need it.

    The first failure is a warning and the end of this sink. What does not fit into the queue is left out, and counted.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Any],
        *,
        start_s: float = START_S,
        close_s: float = CLOSE_S,
        most_waiting: int = MOST_WAITING,
    ):
        """ConfigError of `build` is raised here."""
        self.name, self._close_s = name, close_s
        self._queue: queue.Queue[tuple[int, Mapping[str, Any] | None]] = queue.Queue(most_waiting)
        self._is_open, self._num_left_out = True, 0
        self._refusal: ConfigError | None = None
        self._is_built = threading.Event()
        # No run waits for it as the interpreter ends.
        self._thread = threading.Thread(target=self._work, args=(build,), name=f"logger {name}", daemon=True)
        self._thread.start()
        if not self._is_built.wait(start_s):
            log.warning("logger %s has not begun after %g s; training goes on meanwhile", name, start_s)
        if self._refusal is not None:
            raise self._refusal

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Returns at once."""
        if not self._is_open:
            return
        try:
            self._queue.put_nowait((step, dict(record)))
        except queue.Full:
            if not self._num_left_out:
                log.warning(
                    "logger %s does not keep up: %d records wait, and from step %d on some are left out",
                    self.name, self._queue.maxsize, step,
                )  # fmt: skip
            self._num_left_out += 1

    def close(self) -> None:
        """What waits is written first, within `close_s` seconds."""
        deadline = time.monotonic() + self._close_s
        with contextlib.suppress(queue.Full):
            if self._thread.is_alive():
                self._queue.put(_END, timeout=self._close_s)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            log.warning("logger %s did not end within %g s; its last records may be missing", self.name, self._close_s)
        if self._num_left_out:
            log.warning("logger %s lacks %d records", self.name, self._num_left_out)

    def _work(self, build: Callable[[], Any]) -> None:
        try:
            sink = build()
        except ConfigError as error:
            self._is_open, self._refusal = False, error
            return
        except Exception as error:
            self._is_open = False
            log.warning("logger %s is off: %s: %s", self.name, type(error).__name__, error)
            return
        finally:
            self._is_built.set()
        self._write_all(sink)
        try:
            sink.close()
        except Exception as error:
            if self._is_open:  # else it has had its warning
                log.warning("logger %s could not be closed: %s: %s", self.name, type(error).__name__, error)

    def _write_all(self, sink: Any) -> None:
        while True:
            step, record = self._queue.get()
            if record is None:
                return
            try:
                sink.write(step, record)
            except Exception as error:
                self._is_open = False
                log.warning("logger %s is off from step %d: %s: %s", self.name, step, type(error).__name__, error)
                return

"""The life of the run's server: started, waited for, watched, and started again when it dies.

    starting --(healthy)--> healthy --(dies)--> down --(a moment)--> starting --> unsynced --(weights)--> healthy

A server that dies before it was ever healthy ends the run, and so does one that died too often. After a restart it has
the weights it was started with; the trainer notices and sends the run's (`train/outage.py`). A server whose answers do
not say from which weights they come is never restarted, since its answers could be taken for the run's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from agrpo.launch import diagnosis
from agrpo.launch.processes import Child, Launch, kill, spawn, stop
from agrpo.lifecycle import Life
from agrpo.metrics.console import Console
from agrpo.sync.control import exchange

GRACE_S = 3.0  # between SIGTERM and SIGKILL
WINDOW_S = 3600.0  # over which restarts are counted
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a restart; a killed process gives a GPU's memory back a little later
LOOK_EVERY_S, TELL_EVERY_S = 0.5, 5.0
LOOK_AT_RUNNING_EVERY_S = 2.0
REFUSING_S = 20.0  # a process that lives but answers /health with a refusal or an error for so long is as good as dead
NUM_LAST_LINES = 5  # of its log, shown when it dies
_PREFIX = re.compile(r"^\s*(?:\([^)]*\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR)\s+)?[\d:.,\- ]*(?:\[[^\]]*\]\s*)?")


class Server:
    """A server at `urls`: managed, with a `launch`, or somebody else's, with None."""

    def __init__(
        self,
        launch: Launch | None,
        urls: tuple[str, ...],
        run_dir: Path,
        *,
        timeout_s: float,
        max_restarts: int,
        console: Console,
        refusing_s: float = REFUSING_S,
    ):
        self._refusing_s = refusing_s
        self._launch, self.urls, self._run_dir = launch, urls, run_dir
        self._timeout_s, self._max_restarts, self._console = timeout_s, max_restarts, console
        self.child: Child | None = None
        self._is_restartable = False  # known once it is healthy
        self._restarts: list[float] = []  # time.monotonic() of each
        self._state = "new"
        self._since = self._told_at = self._looked_at = 0.0
        self._well_at = 0.0  # when it last answered as a healthy one, or was too busy to answer
        self._lane = ("", 0.0)  # what the timeline says of it now, and since when (seconds since the epoch)

    def start(self) -> None:
        if self._launch is None:
            return
        self._console.phase("server", f"starting on {self._launch.devices}, log: {self._run_dir}/logs/server.log")
        self.child = spawn(self._launch, self._run_dir)

    def stop(self) -> None:
        """The end of the run."""
        if self.child is not None:
            self._turn("")
            stop([self.child], GRACE_S)

    def await_healthy(self, look_around: Callable[[], None], children: Callable[[], list[Child]]) -> None:
        """At start: poll /health until it answers, at most `server.timeout` seconds (SRV-2); tells its progress.

        `look_around` is called at each look and may raise.
        """
        self._enter("starting")
        for url in self.urls:
            while (answer := health(url)) != "healthy":
                look_around()
                self._raise_if_late(answer, children())
                self._tell_progress(answer)
                time.sleep(0.2)
        self._console.phase("server", f"healthy after {self._in_state_s:.0f} s at {', '.join(self.urls)}")
        self._enter("healthy")
        if self._launch is not None and self._max_restarts:
            self._is_restartable = all(map(is_labelled, self.urls))
            if not self._is_restartable:
                self._console.note(
                    "warning: the server is not restarted if it dies: its answers do not name their weights' version "
                    "(GET /weight_info and POST /inference/v1/generate, vLLM 0.28 or newer with --enable-scale-out)"
                )

    @property
    def has_failed(self) -> bool:
        """Whether the server is dead for good."""
        if self.child is None or self.child.code is None:
            return False
        return self._state != "down" and not (self._is_restartable and self._num_recent < self._max_restarts)

    @property
    def history(self) -> str:
        """What the report of its last death should add."""
        if not self._restarts:
            return ""
        return f"; it was restarted {self._num_recent} times within an hour (server.max_restarts={self._max_restarts})"

    def look(self, children: Callable[[], list[Child]]) -> None:
        """Once per look of the supervisor, never for long: start a dead server again, tell how it comes up.

        Raises ServerError where it does not become healthy within `server.timeout` seconds.
        """
        if self.child is None or self.has_failed:
            return
        if self._state == "down":
            if self._in_state_s >= min(FIRST_PAUSE_S * 2 ** (self._num_recent - 1), LONGEST_PAUSE_S):
                self._start_again()
        elif self.child.code is not None:
            self._take_down()
        elif time.monotonic() - self._looked_at >= (LOOK_EVERY_S if self._state == "starting" else LOOK_AT_RUNNING_EVERY_S):
            self._looked_at = time.monotonic()
            if self._state == "starting":
                self._look_at_restarted(children)
            else:
                self._look_at_running()

    def _look_at_running(self) -> None:
        """End a server whose engine is gone while its process hangs on: then it is one that died.

        No answer in time says nothing: a busy server may be slow. A refused connection or an error status says it all.
        """
        answer = health(self.urls[0], limit_s=1.0)
        if answer == "healthy" or "timed out" in answer:
            self._well_at = time.monotonic()
        elif time.monotonic() - self._well_at > self._refusing_s:
            self._console.event("server", f"its process lives, but /health says: {answer}; ending it")
            kill([self.child])
        if self._state == "unsynced":
            self._tell_weights()

    def _tell_weights(self) -> None:
        """Healthy once the run's weights are there; one that serves adapters never names a version of its own."""
        label = weight_label(self.urls[0], limit_s=1.0)
        if label is not None and label.isdecimal():
            self._console.event("server", f"has the weights of version {label} after {self._in_state_s:.0f} s")
            self._enter("healthy")

    def _take_down(self) -> None:
        self._restarts.append(time.monotonic())
        count = f"restarting ({self._num_recent} of {self._max_restarts})"
        lived = time.monotonic() - self.child.started_at
        self._console.event("server", f"{diagnosis.ending(self.child)} after {lived:.0f} s, {count}")
        for line in self.child.last_lines(NUM_LAST_LINES):
            self._console.note(f"  {line}")
        kill([self.child])  # what it started may hold its port and its memory
        self._enter("down")

    def _start_again(self) -> None:
        for kind in ("alive", "exit"):  # they speak of the one that died
            (self._run_dir / "state" / f"server.{kind}.json").unlink(missing_ok=True)
        self.child = spawn(self._launch, self._run_dir)
        self._enter("starting")

    def _look_at_restarted(self, children: Callable[[], list[Child]]) -> None:
        answer = health(self.urls[0], limit_s=1.0)
        if answer == "healthy":
            self._console.event("server", f"healthy again after {self._in_state_s:.0f} s, waiting for its weights")
            self._enter("unsynced")
        else:
            self._raise_if_late(answer, children())
            self._tell_progress(answer)

    def _raise_if_late(self, answer: str, children: list[Child]) -> None:
        if self._in_state_s > self._timeout_s:
            raise diagnosis.not_healthy(self.child, self.urls, self._timeout_s, answer, children)

    def _tell_progress(self, answer: str) -> None:
        """Its phase, else the last line of its log, else what /health says; every few seconds."""
        if time.monotonic() - self._told_at < TELL_EVERY_S:
            return
        self._told_at = time.monotonic()
        beat = self.child.beat() if self.child else None
        text = beat["phase"] if beat else last_words(self.child) or answer
        self._console.progress("server", f"{text} ({self._in_state_s:.0f} s)")

    @property
    def _num_recent(self) -> int:
        return sum(time.monotonic() - at < WINDOW_S for at in self._restarts)

    @property
    def _in_state_s(self) -> float:
        return time.monotonic() - self._since

    def _enter(self, state: str) -> None:
        self._state = state
        self._turn("serving" if state == "healthy" else "restarting" if self._restarts else "starting")
        self._since = self._told_at = self._well_at = time.monotonic()

    def _turn(self, what: str) -> None:
        """Its timeline, where it is a program that keeps none itself."""
        before, since = self._lane
        if what == before:
            return
        self._lane = (what, time.time())
        if before and self.child is not None and self.child.beat() is None:
            Life(self._run_dir, self.child.name).span(before, since, self._lane[1])


def last_words(child: Child | None) -> str:
    """The last line of its log that says something, without time stamps and the like, shortened."""
    for line in reversed(child.last_lines() if child else []):
        text = _PREFIX.sub("", line).strip()
        if any(c.isalpha() for c in text):
            return text[:100]
    return ""


def health(url: str, limit_s: float = 5.0) -> str:
    """`healthy`, or why not, in a few words."""
    try:
        status, _ = exchange(url, "GET", "/health", limit_s)
    except (OSError, HTTPException, ValueError) as error:
        return f"no answer: {error}"
    return "healthy" if status == 200 else f"HTTP {status}"


def weight_label(url: str, limit_s: float = 5.0) -> str | None:
    """How the server labels its weights; None where it does not say."""
    try:
        status, text = exchange(url, "GET", "/weight_info", limit_s)
        label = json.loads(text).get("weight_version") if status == 200 else None
    except (OSError, HTTPException, ValueError, AttributeError):
        return None
    return None if label is None else str(label)


def is_labelled(url: str) -> bool:
    """Whether each token of its answers comes with the label of its weights."""
    try:
        # An empty request is refused: with 403 by a vLLM without --enable-scale-out, with 404 where the path is missing.
        status, _ = exchange(url, "POST", "/inference/v1/generate", 5.0, {})
    except (OSError, HTTPException, ValueError):
        return False
    return status not in (403, 404) and weight_label(url) is not None

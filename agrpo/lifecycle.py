"""What every process of a run shares: the run directory's runtime facts, signs of life, and the way out.

The supervisor writes `state/runtime.json` once; each child writes `state/<name>.alive.json` (phase and time) as it works
and `state/<name>.exit.json` (code and reason) when it ends by itself; the phases it left are lines of
`timeline/<name>.jsonl`. No child outlives its supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from agrpo.errors import AgrpoError


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Facts known only once the run starts; arguments, not configuration."""

    server_urls: tuple[str, ...]  # base URLs of the generation servers
    wire_host: str
    wire_port: int
    wire_key: str  # hex; both ends of the wire prove they know it
    run_id: str  # path-safe, unique per start

    def save(self, run_dir: Path) -> None:
        write_atomic(run_dir / "state" / "runtime.json", json.dumps(dataclasses.asdict(self)), mode=0o600)

    @staticmethod
    def load(run_dir: Path) -> Runtime:
        fields = json.loads((run_dir / "state" / "runtime.json").read_text())
        return Runtime(**{**fields, "server_urls": tuple(fields["server_urls"])})


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write beside the target and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    beside.write_text(text)
    beside.chmod(mode)
    beside.replace(path)


class Life:
    """The signs of life of one process: `beat(phase)` as often as you like; at most one write per second and phase.

    `beat` from the loop that does the work, never from a timer: a beat means progress (ARCH-8).
    """

    def __init__(self, run_dir: Path, name: str):
        self.run_dir, self.name = Path(run_dir), name
        self._phase, self._since, self._written_at = "", 0.0, 0.0
        self._spans: TextIO | None = None

    def beat(self, phase: str, **detail: object) -> None:
        now = time.time()
        if phase == self._phase and now - self._written_at < 1.0:
            return
        self._turn(phase, now)
        self._written_at = now
        record = {"process": self.name, "pid": os.getpid(), "phase": phase, "time": now, **detail}
        write_atomic(self.run_dir / "state" / f"{self.name}.alive.json", json.dumps(record))

    def _turn(self, phase: str, now: float) -> None:
        """The phase that ends now becomes a line of the timeline."""
        if phase == self._phase:
            return
        if self._phase:
            self.span(self._phase, self._since, now)
        self._phase, self._since = phase, now

    def span(self, what: str, start: float, end: float, **detail: object) -> None:
        """Something that lasted from `start` to `end` (seconds since the epoch): a line of `timeline/<name>.jsonl`."""
        line = json.dumps({"what": what, "start": round(start, 4), "end": round(end, 4), **detail}) + "\n"
        # A full disk ends a timeline, never a run.
        with contextlib.suppress(OSError):
            if self._spans is None:
                path = self.run_dir / "timeline" / f"{self.name}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                self._spans = path.open("a", buffering=1)
            self._spans.write(line)

    def leave(self, code: int, reason: str, text: str = "") -> None:
        self._turn("", time.time())
        record = {"process": self.name, "pid": os.getpid(), "code": code, "reason": reason, "text": text}
        write_atomic(self.run_dir / "state" / f"{self.name}.exit.json", json.dumps(record))


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux); elsewhere a thread watches the parent's pid."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_process(name: str, run_dir: Path, main: Callable[[Path, Life], None]) -> int:
    """Run the body of one child process; every ending leaves its exit code and reason on disk. Returns the exit code."""
    die_with_parent()
    life = Life(run_dir, name)
    life.beat("starting")
    try:
        main(Path(run_dir), life)
    except AgrpoError as error:
        life.leave(error.exit_code, str(error), traceback.format_exc())
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        life.leave(130, "interrupted")
        return 130
    except Exception as error:
        life.leave(1, f"{type(error).__name__}: {error}", traceback.format_exc())
        traceback.print_exc()
        return 1
    life.leave(0, "finished")
    return 0

"""What every process of a run shares: the run directory's runtime facts, signs of life, and the way out.

The supervisor writes `state/runtime.json` once; each child writes `state/<name>.alive.json` (phase, time, what it has
done) as it works and `state/<name>.exit.json` (code and reason) when it ends by itself; the phases it left are lines of
`timeline/<name>.jsonl`. On SIGUSR1 it appends the stacks of its threads to `state/<name>.stacks`. No child outlives its
supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from agrpo.errors import AgrpoError, ServerError

WIRE_PORT, EXPORTED = "wire.port", "exported.step"  # files in state/
END_S = 10.0  # from the last word of a process to its end
FAILURE = "failure.txt"  # in the run's folder: why it failed, as it was printed
# The disk is full, the quota is used up, the file may not grow: nothing that trying again would change.
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Facts known only once the run starts; arguments, not configuration."""

    server_urls: tuple[str, ...]  # base URLs of the generation servers
    wire_host: str
    wire_port: int  # 0 = trainer rank 0 takes a free one and tells it in the run folder
    wire_key: str  # hex; both ends of the wire prove they know it
    run_id: str  # path-safe, unique per start

    def save(self, run_dir: Path) -> None:
        write_atomic(run_dir / "state" / "runtime.json", json.dumps(dataclasses.asdict(self)), mode=0o600)

    @staticmethod
    def load(run_dir: Path) -> Runtime:
        fields = json.loads((run_dir / "state" / "runtime.json").read_text())
        return Runtime(**{**fields, "server_urls": tuple(fields["server_urls"])})


def tell_wire_port(run_dir: Path, port: int) -> None:
    """By trainer rank 0, once it listens."""
    write_atomic(run_dir / "state" / WIRE_PORT, str(port))


def told_wire_port(run_dir: Path) -> int | None:
    """None until it listens."""
    try:
        return int((run_dir / "state" / WIRE_PORT).read_text())
    except FileNotFoundError:
        return None


def tell_exported(run_dir: Path, step: int) -> None:
    """By trainer rank 0, once `model/` holds the model of this step; a run that is continued leaves it there."""
    write_atomic(run_dir / "state" / EXPORTED, str(step))


def exported_step(run_dir: Path) -> int | None:
    """The step of `model/`; None where it is not known."""
    try:
        return int((run_dir / "state" / EXPORTED).read_text())
    except (FileNotFoundError, ValueError):
        return None


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write beside the target and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(beside, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:  # never open to others meanwhile
        file.write(text)
    beside.replace(path)


class Life:
    """The signs of life of one process: `beat(phase)` as often as you like; at most one write per second and phase.

    `beat` from the loop that does the work, never from a timer: a beat means progress (ARCH-8). `done` counts what was
    achieved since the start (answers, scored groups, steps, syncs); the supervisor compares it from look to look.
    """

    def __init__(self, run_dir: Path, name: str):
        self.run_dir, self.name = Path(run_dir), name
        self.done: Counter[str] = Counter()
        self._phase, self._since, self._written_at = "", 0.0, float("-inf")
        self._spans: TextIO | None = None

    def beat(self, phase: str, **detail: object) -> None:
        """`at` is read from the machine's monotonic clock, which all its processes share and nobody can set."""
        now = time.monotonic()
        if phase == self._phase and now - self._written_at < 1.0:
            return
        self._turn(phase, time.time())
        self._written_at = now
        record = {"process": self.name, "pid": os.getpid(), "phase": phase, "at": now, "time": time.time()}
        record |= {"done": dict(self.done), **detail}
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

    def leave(self, code: int, reason: str, text: str = "", is_consequence: bool = False) -> None:
        """The exit code counts also where the disk takes no more."""
        self._turn("", time.time())
        record = {"process": self.name, "pid": os.getpid(), "code": code, "reason": reason, "text": text}
        record["is_consequence"] = is_consequence
        try:
            write_atomic(self.run_dir / "state" / f"{self.name}.exit.json", json.dumps(record))
        except OSError as error:
            print(f"{self.name}: {error}", file=sys.stderr)

    def answer_for_stacks(self) -> None:
        """From now on SIGUSR1 writes the stacks of all threads, also while the main thread hangs in a call."""
        path = self.run_dir / "state" / f"{self.name}.stacks"
        path.parent.mkdir(parents=True, exist_ok=True)
        faulthandler.register(signal.SIGUSR1, path.open("w"), all_threads=True)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """For imports and loading: what they make stays, and looking through it again and again is a fifth of their time.

    It is looked through once at the end, and never again: half a second each time, in which the process does nothing else.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


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
    """Run the body of one child process; every ending leaves its exit code and reason on disk. Returns the exit code, with
    which the process ends in any case: what libraries have left running, an upload for example, is given END_S seconds."""
    try:
        code = _run(name, run_dir, main)
    finally:
        gc.freeze()  # the interpreter's end looks through everything otherwise, for a second and more with PyTorch
    threading.Thread(target=_end, args=(name, code), name="end", daemon=True).start()
    return code


def _end(name: str, code: int) -> None:
    time.sleep(END_S)
    _say(f"{name}: something was still running {END_S:g} s after the end; it was ended")
    os._exit(code)


def _run(name: str, run_dir: Path, main: Callable[[Path, Life], None]) -> int:
    die_with_parent()
    life = Life(run_dir, name)
    try:
        life.answer_for_stacks()
        life.beat("starting")
        main(Path(run_dir), life)
    except AgrpoError as error:
        return _leave(life, error)
    except OSError as error:
        if error.errno in NO_SPACE:
            return _leave(life, no_space(error, run_dir))
        return _leave_unexpected(life, error)
    except KeyboardInterrupt:
        life.leave(130, "interrupted")
        return 130
    except SystemExit:
        raise
    except BaseException as error:  # torch's errors of checkpoints are none of Exception
        return _leave_unexpected(life, error)
    life.leave(0, "finished")
    return 0


def no_space(error: OSError, place: Path) -> ServerError:
    """The host's fault in words, with the file where it is known."""
    path = error.filename or place
    return ServerError(
        f"{path} could not be written: {os.strerror(error.errno)}; free space (df -h {place}), then continue with "
        "run.resume=auto"
    )


def _leave(life: Life, error: AgrpoError) -> int:
    life.leave(error.exit_code, str(error), traceback.format_exc(), error.is_consequence)
    _say(f"{life.name}: {error}")
    return error.exit_code


def _leave_unexpected(life: Life, error: BaseException) -> int:
    text = traceback.format_exc()
    life.leave(1, f"{type(error).__name__}: {error}", text)
    _say(text)
    return 1


def _say(text: str) -> None:
    """To the log, which may lie on the same full disk."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass

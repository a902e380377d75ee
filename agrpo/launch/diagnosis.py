"""Why a run ended: which process, how, its own words, the last sign of life of each, the last lines of its log."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator

import psutil

from agrpo.errors import AgrpoError, ConfigError, ContractError, ServerError, StallError
from agrpo.launch.processes import Child, descendants, num_oom_kills

NO_SPACE_BYTES = 1 << 20  # with less than this a run cannot write its next line
ERRORS = {error.exit_code: error for error in (ConfigError, ServerError, ContractError, StallError)}


def died(child: Child, children: list[Child], history: str = "") -> AgrpoError:
    """The error for a process that ended when it should not have; its exit code is that of the run (CLI-11)."""
    kind = ERRORS.get(child.code, ServerError if child.name == "server" else AgrpoError)
    error = kind(_paragraph(f"{child.name} {ending(child)}{history}", child, children))
    # One that gave up on a server: the server still does what it did when it should have answered.
    error.is_expiry |= kind is ServerError and child.name != "server"
    return error


def ending(child: Child) -> str:
    """How a process ended, with its own reason where it left one."""
    record, code = child.exit_record(), child.code
    if code == -signal.SIGKILL and num_oom_kills() > child.oom_kills:
        return "was killed by SIGKILL: memory was used up and the system ended a process (dmesg names it); lower what this one takes"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    reason = f": {record['reason']}" if record and record.get("reason") else ""
    return f"ended with exit code {code}{reason}"


def silent(child: Child, seconds: float, limit: float, key: str, children: list[Child]) -> StallError:
    """The error for a process that shows no progress; `key` is what sets the limit (ARCH-6, ARCH-9)."""
    beat = child.beat()
    phase = f" (it was: {beat['phase']})" if beat else " (it never showed one)"
    head = f"{child.name} gave no sign of life for {seconds:.0f} s{phase}; the limit is {key}={limit:g}"
    return StallError(_paragraph(head, child, children))


def stuck(seconds: float, limit: float, since: str, children: list[Child]) -> StallError:
    """The error for a run in which everybody waits (ARCH-8); `since` says when what was last achieved."""
    phases = ", ".join(f"{c.name} is {beat['phase']!r}" for c in children if (beat := c.beat()))
    head = f"nothing was achieved for {seconds:.0f} s (rollout.progress_timeout={limit:g}): {since}; {phases}"
    return StallError(_paragraph(head, children[-1], children))


def not_healthy(
    child: Child | None, urls: tuple[str, ...], limit: float, answer: str, children: list[Child]
) -> ServerError:
    """The error for a server that does not become healthy in time (SRV-2)."""
    head = f"the server at {', '.join(urls)} is not healthy after {limit:g} s ({answer}); raise server.timeout"
    error = ServerError(_paragraph(head, child, children) if child else head)
    error.is_expiry = True
    return error


def cause(dead: list[Child]) -> Child:
    """Which of several dead processes came first: one killed from outside, else the first that left its reason.

    A process that loses its peer ends by itself soon after, so a kill without a record precedes every record. The peer may
    take longer to end than the one that lost it.
    """

    def order(child: Child) -> tuple[int, float]:
        path = child.run_dir / "state" / f"{child.name}.exit.json"
        return (0, 0.0) if not path.exists() else (1 + is_consequence(child), path.stat().st_mtime)

    return min(dead, key=order)


def is_consequence(child: Child) -> bool:
    """Whether a process ended only because it lost another."""
    return bool((child.exit_record() or {}).get("is_consequence"))


def _paragraph(head: str, child: Child, children: list[Child]) -> str:
    lines = [head + ".", *_findings(children)]
    lines.append("Last signs of life: " + "; ".join(_sign(c) for c in children) + ".")
    tail = child.last_lines()
    lines.append(f"Last lines of {child.log_path}:" if tail else f"{child.log_path} is empty.")
    return "\n".join(lines + [f"  {line}" for line in tail])


def _findings(children: list[Child]) -> Iterator[str]:
    """What the machine says about the processes and their disk, where that explains something."""
    for child in children:
        for process in descendants(child)[1:]:
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    yield f"{child.name} was stopped by a signal: kill -CONT {process.pid} lets it go on."
    with contextlib.suppress(OSError, IndexError):
        if shutil.disk_usage(folder := children[0].run_dir).free < NO_SPACE_BYTES:
            yield f"The disk that holds {folder} is full."


def _sign(child: Child) -> str:
    beat, now = child.beat(), time.monotonic()
    state = "" if child.code is None else " (ended)"
    if beat is None:
        return f"{child.name}{state} none, started {now - child.started_at:.0f} s ago"
    return f"{child.name}{state} {beat['phase']!r} {max(0.0, now - beat['at']):.1f} s ago"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

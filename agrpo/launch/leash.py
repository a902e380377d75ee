"""Runs one command and takes its whole process group down when the supervisor is gone, even after SIGKILL.

    python leash.py COMMAND ...

What a command starts in turn (a server's engines, a reward's subprocess) asks for no parent-death signal; the group
does not need it to. SIGTERM is passed on to the command alone. Ends as the command ends: by its exit code or signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
LOOK_S = 0.25  # how often the supervisor is looked for
MOST_FILES = 1 << 16  # connections and files that a process may have open, where the system allows so many


def main(command: list[str]) -> None:
    supervisor, started, asked = os.getppid(), [], []

    def look(number: int = 0, frame: object = None) -> None:
        if os.getppid() != supervisor:
            os.killpg(0, signal.SIGKILL)

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        for process in started:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGALRM, look)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler tells every process that the time is nearly up; the supervisor does what is to be done. The command inherits it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    started.append(subprocess.Popen(command, preexec_fn=before_command))
    if asked:  # before there was a process to pass it on to
        started[0].send_signal(signal.SIGTERM)
    code = started[0].wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    look()
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


def before_command() -> None:
    """In the child: signals as usual again, death with the leash where the kernel offers that, and as many open files as the
    user may have: the usual 1024 are used up by a few hundred rollouts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs one command and takes its whole process group down when the supervisor dies, even by SIGKILL.

    python leash.py COMMAND ...

What a command starts in turn (a server's engines, a reward's subprocess) asks for no parent-death signal; the group does
not need it to. SIGTERM is passed on to the command alone. Ends as the command ends: same exit code, or the same signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    supervisor, started = os.getppid(), []

    def on_term(number: int, frame: object) -> None:
        # The kernel sends it too, when the supervisor is gone.
        if os.getppid() != supervisor:
            os.killpg(0, signal.SIGKILL)
        for process in started:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != supervisor:
        os.killpg(0, signal.SIGKILL)

    def before_command() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)

    started.append(subprocess.Popen(command, preexec_fn=before_command))
    code = started[0].wait()
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


def die_with_parent(number: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs one command in this process group and takes the whole group down when the supervisor dies, even by SIGKILL.

    python leash.py COMMAND ...

A server of somebody else's starts processes of its own and asks for no parent-death signal; this process does so for it.
Ends as the command ends: same exit code, or the same signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    supervisor = os.getppid()

    def on_term(number: int, frame: object) -> None:
        # The group's SIGTERM reaches the command by itself; one sent by the kernel means that the supervisor is gone.
        if os.getppid() != supervisor:
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    if sys.platform.startswith("linux"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != supervisor:
            os.killpg(0, signal.SIGKILL)

    def follow() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform.startswith("linux"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    code = subprocess.Popen(command, preexec_fn=follow).wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Kills the process groups of the workers when the rollout process is gone, so that what a reward started dies with it.

The kernel's parent-death signal reaches a worker but not the processes a reward function started. Runs as a script, in
its own session: reads "+group" and "-group" lines from stdin, and at its end (the rollout process died or closed) kills the rest.
A signal to every process of the run ends others first: what they leave behind is then this one's work.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()

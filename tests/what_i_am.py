"""`python -m tests.what_i_am [EXIT_CODE]`: what a process finds at its start, as JSON; ends with that code."""

import json
import os
import signal
import sys
import threading

if __name__ == "__main__":
    handlers = {n.name: repr(signal.getsignal(n)) for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)}
    found = {
        "arguments": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid(),
        "leads_session": os.getsid(0) == os.getpid(), "files": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3],
        "threads": threading.active_count(), "handlers": handlers, "agrpo": [n for n in sys.modules if n.startswith("agrpo")],
        "input": sys.stdin.read(), "path": [p for p in sys.path if p in (os.getcwd(), os.environ.get("PYTHONPATH"))],
    }  # fmt: skip
    print(json.dumps(found))
    print("to the other file", file=sys.stderr)
    sys.exit(int(sys.argv[1]) if sys.argv[1:] else None)

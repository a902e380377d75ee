"""All faults, by where they strike; `python -m tests.faults` also runs those that need a whole run."""

from __future__ import annotations

from tests.faults import of_processes, of_servers, of_storage, of_sync, of_the_wire, of_user_code, of_whole_runs

PARTS = (of_servers, of_sync, of_the_wire, of_user_code, of_storage, of_processes, of_whole_runs)
FAULTS = [fault for part in PARTS for fault in part.FAULTS]


def start() -> None:
    of_servers.start()


def close() -> None:
    of_servers.close()
    of_storage.close()

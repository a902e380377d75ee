"""The run folder before the first process starts: configuration, versions, empty state, and a lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import platform
import secrets
import time
from pathlib import Path
from typing import IO

import agrpo
from agrpo.config import Config, public, save
from agrpo.errors import AgrpoError, ConfigError
from agrpo.launch.plan import Ports, server_urls
from agrpo.lifecycle import FAILURE, WIRE_PORT, Runtime, write_atomic
from agrpo.metrics.summary import FILE_NAME as SUMMARY

PACKAGES = ("torch", "transformers", "vllm", "hydra-core", "numpy", "aiohttp")


def prepare(config: Config, overrides: list[str], ports: Ports) -> IO[str]:
    """Write everything that the processes read at start (CLI-10). The lock lasts until the returned file is closed."""
    run_dir = Path(config.run.output_dir)
    state = run_dir / "state"
    state.mkdir(parents=True, exist_ok=True)
    lock = _lock(run_dir)
    ends = (run_dir / SUMMARY, run_dir / FAILURE)  # of the run that is continued
    for left_over in (*state.glob("*.alive.json"), *state.glob("*.exit.json"), *state.glob(".*"), state / WIRE_PORT, *ends):
        left_over.unlink(missing_ok=True)
    save(config, run_dir, overrides)
    write_atomic(
        run_dir / "versions.json", json.dumps({**versions(), "overrides": public(config, overrides)}, indent=1) + "\n"
    )
    runtime = Runtime(
        server_urls=server_urls(config, ports),
        wire_host="127.0.0.1",
        wire_port=0,
        wire_key=secrets.token_hex(32),
        run_id=f"{time.strftime('%Y%m%d%H%M%S')}-{secrets.token_hex(3)}",
    )
    runtime.save(run_dir)
    return lock


def keep_failure(run_dir: Path, error: Exception) -> None:
    """Why the run ended, as it is printed too; a disk that takes no more must not hide it."""
    text = str(error) if isinstance(error, AgrpoError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        write_atomic(run_dir / FAILURE, text + "\n")


def _lock(run_dir: Path) -> IO[str]:
    lock = (run_dir / "state" / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"run.output_dir: another run is active in {run_dir}; stop it, or choose another folder"
        ) from None
    except OSError:  # a file system that knows no locks, as Lustre may be mounted
        pass
    return lock


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"agrpo": agrpo.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found

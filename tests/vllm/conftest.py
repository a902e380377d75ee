"""Servers of real vLLM for the tests that need one: started when asked for, kept while the session may use them again.

What every server of agrpo must do is tested on both of BOTH: the embedded one always, vLLM with `-m vllm`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agrpo.serve.embedded import EmbeddedServer
from agrpo.sync.gloo import Gloo
from tests.standins import tiny_qwen3

BOTH = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]
# Of all workers of pytest-xdist; each holds one to two gigabytes, and the one not asked for longest is stopped first.
MOST_ALIVE = max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
START_LIMIT_S = 240.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# A later flag wins over an earlier one, so `arguments` of a test may repeat any of these.
ARGUMENTS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--seed", "42")
ARGUMENTS += ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
# Arguments and environment of a server for adapters of three versions at once.
ADAPTERS = (("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})


@dataclass(slots=True)
class Server:
    """One running vLLM: its address, and what a failing test wants to read."""

    url: str
    model: str  # path, which is also the name it serves under
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM to its whole process group, SIGKILL after ten seconds."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                if sign == signal.SIGTERM:
                    continue  # the engine of a front end that left at once may still be there
                return


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python of an environment with vLLM, from AGRPO_VLLM_PYTHON."""
    python = os.environ.get("AGRPO_VLLM_PYTHON")
    if not python:
        pytest.skip("AGRPO_VLLM_PYTHON is not set: the Python of an environment with vllm")
    return python


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of random weights, untied, float32, that every server test may share; nobody writes to it."""
    return str(tiny_qwen3(tmp_path_factory.mktemp("tiny") / "qwen3"))


@pytest.fixture(scope="session")
def vllm_server(
    vllm_python: str, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """`vllm_server(model=None, arguments=(), environment={}, defaults=True)`: a healthy server of exactly that kind.

    The same question gets the same server while it is alive. `defaults=False` leaves ARGUMENTS away. An environment
    variable set to None is removed. Only the last MOST_ALIVE servers asked for are kept.
    """
    servers: dict[tuple, Server] = {}

    def ask(
        model: str | Path | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
        defaults: bool = True,
    ) -> Server:
        argv = [*(ARGUMENTS if defaults else ()), *arguments]
        variables = {**ENVIRONMENT, **(environment or {})}
        key = (str(model or tiny_model), tuple(argv), tuple(sorted(variables.items(), key=lambda item: item[0])))
        server = servers.pop(key, None)
        if server is None or not server.is_alive:
            while len(servers) >= MOST_ALIVE:
                servers.pop(next(iter(servers))).stop()
            server = start(vllm_python, key[0], argv, variables, tmp_path_factory.mktemp("vllm") / "log")
        servers[key] = server
        return server

    yield ask
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[Callable[..., EmbeddedServer]]:
    """`embedded_server(model)`: the embedded server, with a receiver for weights over gloo; kept for the session."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, EmbeddedServer] = {}

        def ask(model: str) -> EmbeddedServer:
            if model not in servers:
                servers[model] = stack.enter_context(EmbeddedServer(model, receiver=Gloo.receiver))
                servers[model].model = model
            return servers[model]

        yield ask


def start(python: str, model: str, arguments: Sequence[str], variables: Mapping[str, str | None], log: Path) -> Server:
    """A server on a free port, waited for until it is healthy; its last lines where it dies or is too slow."""
    port = free_port()
    # Nothing of this environment but the path, so that no module of it is found from there.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {k: v for k, v in variables.items() if v is not None}
    for name in (k for k, v in variables.items() if v is None):
        environment.pop(name, None)
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    argv += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
        )
    server = Server(f"http://127.0.0.1:{port}", model, log, process)
    deadline = time.monotonic() + START_LIMIT_S
    try:
        while not is_healthy(server.url):
            if not server.is_alive:
                pytest.fail(f"vLLM ended with {process.returncode}: {' '.join(argv)}\n{server.tail()}")
            if time.monotonic() > deadline:
                pytest.fail(f"vLLM was not healthy after {START_LIMIT_S:.0f} s: {' '.join(argv)}\n{server.tail()}")
            time.sleep(0.5)
    except BaseException:
        server.stop()
        raise
    return server


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

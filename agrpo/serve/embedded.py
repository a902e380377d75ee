"""The embedded server: `server=embedded`, a real HTTP server on loopback over a transformers model, on CPU or GPU.

It has a small engine of its own. transformers' continuous batching returns one log-probability per token and takes one
seed for the whole process: no top-k log-probabilities, per-request seeds, candidate sets, weight versions, or pause
with requests in flight, all of which the contract needs.

    process: [event loop: HTTP] <-> [engine thread: model, cache, requests]
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agrpo.errors import ServerError
from agrpo.lifecycle import Life, Runtime, run_process, without_collector
from agrpo.schema import setting
from agrpo.serve.flags import ServerCommand

if TYPE_CHECKING:
    from agrpo.serve.service import Service

log = logging.getLogger(__name__)

# Handler threads hold the interpreter while they build JSON; the engine would wait 5 ms for it after every operation.
_SWITCH_INTERVAL_S = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Settings of the embedded server; the supervisor starts it as `planned`."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 = other machines too; the port is chosen at start")
    timeout: float = setting(
        1800.0, "seconds to wait for the server at start and for each request (SRV-2, SRV-3)", gt=0
    )
    max_restarts: int = setting(5, "times within an hour it is started again after it died; 0 = never", ge=0)
    model_name: str | None = setting(None, "name requests use; null = model.path")
    parity_limit: float | None = setting(0.2, "largest mean log-prob difference after a sync; null = no check", gt=0)
    max_model_len: int | None = setting(None, "longest context in tokens; null = the model's, at most 4096", ge=2)
    max_num_seqs: int = setting(256, "requests generated together", ge=1)
    kv_cache_tokens: int | None = setting(None, "tokens of key-value cache; null = from free memory", ge=2)
    dtype: str | None = setting(
        None, "weight type; null = model.dtype", choices=(None, "auto", "float32", "bfloat16", "float16")
    )
    max_logprobs: int = setting(32, "most log-probs per token a request may ask for", ge=1)
    max_loras: int | None = setting(
        None, "adapters loaded at once; 0 = no adapters; null = rollout.max_staleness + 2", ge=0
    )
    max_lora_rank: int | None = setting(None, "largest adapter rank; null = model.lora.r", ge=1)
    device: str | None = setting(None, "torch device; null = a GPU if there is one")
    threads: int = setting(1, "CPU threads of the engine; 1 leaves a core of a laptop to the trainer", ge=1)

    def planned(self, run_dir: Path, config: Any = None, port: int = 0, num_gpus: int = 0) -> ServerCommand:
        """Its process; thread counts must be known before torch is imported."""
        count = str(self.threads)
        environment = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
        return ServerCommand([sys.executable, "-m", "agrpo.serve.embedded", str(run_dir)], [], environment)

    def problems(self, config: Any) -> list[str]:
        lines = []
        wanted = getattr(config.sampler, "num_sampler_logprobs", 0)
        if getattr(config.loss, "wants_head", False) and wanted >= self.max_logprobs:
            lines.append(
                f"sampler.num_sampler_logprobs must be below server.max_logprobs = {self.max_logprobs}, got {wanted}"
            )
        longest = getattr(config.sampler, "max_completion_length", 0)
        if self.max_model_len is not None and longest >= self.max_model_len:
            lines.append(
                f"sampler.max_completion_length must be below server.max_model_len = {self.max_model_len}, got {longest}"
            )
        if (
            self.kv_cache_tokens is not None
            and self.max_model_len is not None
            and self.kv_cache_tokens < self.max_model_len
        ):
            lines.append(
                f"server.kv_cache_tokens must be at least server.max_model_len = {self.max_model_len}, "
                f"got {self.kv_cache_tokens}"
            )
        lines += self._adapter_problems(config)
        receiver = getattr(config.sync, "receiver", None)
        if receiver and "." not in receiver:
            lines.append(f"sync.receiver must be an import path such as package.module.Class, got {receiver!r}")
        return lines


    def _adapter_problems(self, config: Any) -> list[str]:
        """Slots and rank, where adapters may be sent (LORA-5, LORA-6)."""
        mode = getattr(config.sync, "mode", "merged")
        if not config.model.lora.enabled or mode == "merged":
            return []
        lines, needed, rank = [], config.rollout.max_staleness + 2, config.model.lora.r
        if self.max_loras == 0 and mode == "lora":
            lines.append(f"sync.mode=lora needs server.max_loras={needed}, rollout.max_staleness + 2, got 0; or leave it null")
        elif self.max_loras and self.max_loras < needed:
            lines.append(f"server.max_loras must be at least rollout.max_staleness + 2 = {needed}, got {self.max_loras}")
        if self.max_lora_rank is not None and self.max_lora_rank < rank:
            lines.append(f"server.max_lora_rank must be at least model.lora.r = {rank}, got {self.max_lora_rank}")
        return lines

    def of_run(self, config: Any) -> Embedded:
        """Every null that the rest of the configuration decides, filled in."""
        model, settings = config.model, self
        if settings.dtype is None:
            settings = replace(settings, dtype=model.init_kwargs.get("dtype", model.dtype))
        if settings.max_loras is None:
            settings = replace(settings, max_loras=config.rollout.max_staleness + 2 if model.lora.enabled else 0)
        if settings.max_lora_rank is None:
            settings = replace(settings, max_lora_rank=model.lora.r)
        return settings


async def run_service(
    service: Service, host: str, port: int, stop: asyncio.Event, ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until `stop` is set, or until the engine fails: then ServerError with its reason."""
    from aiohttp import web

    from agrpo.serve.routes import build_app

    loop = asyncio.get_running_loop()
    service.engine.on_failure = lambda: loop.call_soon_threadsafe(stop.set)
    # A client that disconnects cancels its handler, and the handler its request.
    runner = web.AppRunner(build_app(service), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    service.engine.start()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as error:
            raise ServerError(f"cannot listen on {host}:{port}: {error.strerror}; set server.host") from error
        ready(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()
        service.engine.stop()
        service.engine.weights.disconnect()
    if service.engine.failure is not None:
        failure = service.engine.failure
        raise ServerError(f"the embedded engine stopped: {type(failure).__name__}: {failure}")


def serve(
    model_path: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Embedded | None = None,
    receiver: str | None = None,
    beat: Callable[[str], None] = lambda phase: None,
    **load: object,
) -> None:
    """Serve one model in this process until SIGTERM or SIGINT."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with without_collector():
        from transformers.utils.logging import disable_progress_bar

        from agrpo.serve.service import open_service

        disable_progress_bar()
        service = open_service(model_path, settings or Embedded(), receiver, beat, **load)

    async def until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_service(service, host, port, stop, lambda bound: log.info("listening on http://%s:%d", host, bound))

    asyncio.run(until_signal())


class EmbeddedServer:
    """The server in a thread of this process, on a free port: `with EmbeddedServer(path) as server: server.url`."""

    def __init__(self, model_path: str | Path, receiver: str | None = None, **settings: object):
        self.model_path, self.receiver, self.settings = str(model_path), receiver, Embedded(**settings)
        self.service: Service | None = None
        self.url = ""

    def __enter__(self) -> EmbeddedServer:
        from agrpo.serve.service import open_service

        self.service = open_service(self.model_path, self.settings, self.receiver)
        self._started, self._failure = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="embedded-server", daemon=True)
        self._thread.start()
        if not self._started.wait(timeout=60) or self._failure is not None:
            raise ServerError(f"the embedded server did not start: {self._failure}")
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)

    def _run(self) -> None:
        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await run_service(self.service, self.settings.host, 0, self._stop, self._ready)

        try:
            asyncio.run(run())
        except (OSError, ServerError) as error:
            self._failure = error
            self._started.set()

    def _ready(self, port: int) -> None:
        self.url = f"http://{self.settings.host}:{port}"
        self._started.set()


def main(run_dir: Path, life: Life) -> None:
    """The server process of a run: settings from its config, address from its runtime facts."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    life.beat("loading model")
    config = importlib.import_module("agrpo.config").load(run_dir)
    address = urlsplit(Runtime.load(run_dir).server_urls[0])
    model = config.model
    load = {"trust_remote_code": model.trust_remote_code}
    if "revision" in model.init_kwargs:
        load["revision"] = model.init_kwargs["revision"]
    settings = config.server.of_run(config)
    receiver = getattr(config.sync, "receiver", None) or None  # a mechanism without one leaves it empty
    serve(model.path, settings.host, address.port, settings, receiver, life.beat, **load)


if __name__ == "__main__":
    sys.exit(run_process("server", Path(sys.argv[1]), main))

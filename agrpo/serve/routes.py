"""The HTTP side: the part of vLLM's contract that agrpo uses, answered by the engine.

Handlers run in the process's event loop and never touch the model; they wait for the engine's thread, and a client
that goes away takes its request with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from agrpo.serve.answers import completion_answer, generate_answer
from agrpo.serve.parse import Parsed, RefusedRequest, parse_completion, parse_generate
from agrpo.serve.request import Request
from agrpo.serve.service import Service
from agrpo.serve.weights import WeightError

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 256 * 2**20


def build_app(service: Service) -> web.Application:
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
    handlers = Handlers(service)
    app.add_routes(
        [
            web.get("/health", handlers.health),
            web.get("/v1/models", handlers.models),
            web.get("/metrics", handlers.metrics),
            web.get("/server_info", handlers.server_info),
            web.get("/get_world_size", handlers.world_size),
            web.get("/is_paused", handlers.is_paused),
            web.get("/weight_info", handlers.weight_info),
            web.post("/inference/v1/generate", handlers.generate),
            web.post("/v1/completions", handlers.completions),
            web.post("/pause", handlers.pause),
            web.post("/resume", handlers.resume),
            web.post("/abort_requests", handlers.abort_requests),
            web.post("/inference/v1/abort_requests", handlers.abort_requests),
            web.post("/init_weight_transfer_engine", handlers.init_transfer),
            web.post("/shutdown_weight_transfer_engine", handlers.shutdown_transfer),
            web.post("/start_weight_update", handlers.start_update),
            web.post("/update_weights", handlers.update_weights),
            web.post("/finish_weight_update", handlers.finish_update),
            web.post("/update_weight_version", handlers.update_version),
            web.post("/collective_rpc", handlers.collective_rpc),
            web.post("/v1/load_lora_adapter", handlers.load_adapter),
            web.post("/v1/unload_lora_adapter", handlers.unload_adapter),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.Response]]) -> web.Response:
    try:
        return await handler(request)
    except RefusedRequest as error:
        return _error(error.status, error.text)
    except WeightError as error:
        return _error(400, str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, f"{type(error).__name__}: {error}")


def _error(status: int, text: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return _json({"error": {"message": text, "type": kind, "code": status}}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def _body(request: web.Request) -> dict:
    raw = await request.read()
    try:
        body = msgspec.json.decode(raw) if raw else {}
    except msgspec.DecodeError as error:
        raise RefusedRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedRequest(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _needed(body: dict, name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        raise RefusedRequest(400, f"{name} is required and must be of type {kind.__name__}, got {value!r}")
    return value


class Handlers:
    def __init__(self, service: Service):
        self.service, self.engine = service, service.engine

    async def _do(self, command: Callable[[], Any]) -> Any:
        """Run a command in the engine's thread."""
        return await asyncio.wrap_future(self.engine.call(command))

    # --- generation

    async def generate(self, http: web.Request) -> web.Response:
        body = await _body(http)
        parsed = parse_generate(body, self.service.limits)
        return _json(generate_answer(await self._finished(parsed, body.get("model"))))

    async def completions(self, http: web.Request) -> web.Response:
        body = await _body(http)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            if self.service.tokenizer is None:
                raise RefusedRequest(400, "this model has no tokenizer: prompt must be a list of token ids")
            prompt = self.service.tokenizer(prompt)["input_ids"]
        parsed = parse_completion(body, prompt, self.service.limits)
        request = await self._finished(parsed, body.get("model"))
        name = body.get("model") or self.service.name
        return _json(completion_answer(request, body, name, self.service.tokenizer))

    async def _finished(self, parsed: Parsed, model: str | None) -> Request:
        """Submit and wait; a handler cancelled by its client's disconnect frees the slot."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Request] = loop.create_future()

        def resolve(request: Request) -> None:
            if not future.done():
                future.set_result(request)

        request = self.service.request(parsed, model, lambda done: loop.call_soon_threadsafe(resolve, done))
        self.engine.submit(request)
        try:
            await future
        except asyncio.CancelledError:
            self.engine.call(lambda: self.engine.abort({id(request)}))
            raise
        if request.finish_reason == "error":
            raise RefusedRequest(500, request.error)
        return request

    async def abort_requests(self, http: web.Request) -> web.Response:
        ids = _needed(await _body(http), "request_ids", list)
        return _json({"aborted": await self._do(lambda: self.engine.abort_ids(set(ids)))})

    # --- readings

    async def health(self, http: web.Request) -> web.Response:
        if self.engine.failure is not None:
            raise RefusedRequest(503, f"the engine stopped: {self.engine.failure}")
        return web.Response()

    async def models(self, http: web.Request) -> web.Response:
        return _json({"object": "list", "data": self.service.models()})

    async def metrics(self, http: web.Request) -> web.Response:
        counts, cache = self.engine.counts(), self.engine.runner.cache
        config = f'block_size="1",kv_cache_size_tokens="{cache.num_tokens}",num_gpu_blocks="{cache.num_tokens}"'
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {counts["running"]}',
            f'vllm:num_requests_waiting{{engine="0"}} {counts["waiting"]}',
            f'vllm:kv_cache_usage_perc{{engine="0"}} {counts["usage"]}',
            f'vllm:num_preemptions_total{{engine="0"}} {self.engine.num_preemptions}',
            f'vllm:prompt_tokens_total{{engine="0"}} {self.engine.num_prompt_tokens}',
            f'vllm:generation_tokens_total{{engine="0"}} {self.engine.num_output_tokens}',
            f'vllm:cache_config_info{{engine="0",{config}}} 1',
        ]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def server_info(self, http: web.Request) -> web.Response:
        settings, limits = self.service.settings, self.service.limits
        lora = (
            {"max_lora_rank": settings.max_lora_rank, "max_loras": settings.max_loras} if settings.max_loras else None
        )
        model_config = {
            "model": self.service.root,
            "dtype": str(self.service.dtype),
            "max_model_len": limits.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": limits.max_logprobs,
            "vocab_size": limits.vocab_size,
        }
        config = {"model_config": model_config, "lora_config": lora, "parallel_config": {"data_parallel_size": 1}}
        return _json({"vllm_config": config, "version": "agrpo-embedded"})

    async def world_size(self, http: web.Request) -> web.Response:
        return _json({"world_size": 1})

    async def is_paused(self, http: web.Request) -> web.Response:
        return _json({"is_paused": self.engine.is_paused})

    async def weight_info(self, http: web.Request) -> web.Response:
        weights = self.engine.weights
        info = {
            "weight_version": self.engine.version,
            "num_updates": weights.num_updates,
            "is_partial": weights.is_partial,
        }
        return _json(info)

    # --- pause and weights

    async def pause(self, http: web.Request) -> web.Response:
        mode, clear = http.query.get("mode", "abort"), http.query.get("clear_cache", "true").lower()
        if mode not in ("keep", "wait", "abort"):
            raise RefusedRequest(400, f"mode must be one of keep, wait, abort, got {mode!r}")
        if clear not in ("true", "false", "1", "0"):
            raise RefusedRequest(400, f"clear_cache must be true or false, got {clear!r}")
        stopped = await self._do(lambda: self.engine.pause(mode, clear in ("true", "1")))
        await asyncio.wrap_future(stopped)
        return _json({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        await self._do(self.engine.resume)
        return _json({"status": "resumed"})

    async def init_transfer(self, http: web.Request) -> web.Response:
        info = _needed(await _body(http), "init_info", dict)
        # Meeting the sender may take its whole time limit; generation goes on meanwhile.
        await asyncio.to_thread(self.engine.weights.connect, info)
        return _json({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self.engine.weights.disconnect)
        return _json({"message": "Weight transfer shut down"})

    async def start_update(self, http: web.Request) -> web.Response:
        await self._do(self.engine.weights.start)
        return _json({"message": "Weight update started"})

    async def update_weights(self, http: web.Request) -> web.Response:
        info = _needed(await _body(http), "update_info", dict)
        count = await self._do(lambda: self.engine.update_weights(info))
        return _json({"message": "Weights updated", "num_tensors": count})

    async def finish_update(self, http: web.Request) -> web.Response:
        version = (await _body(http)).get("weight_version")
        await self._do(lambda: self.engine.finish_update(None if version is None else str(version)))
        return _json({"message": "Weight update finished"})

    async def update_version(self, http: web.Request) -> web.Response:
        version = (await _body(http)).get("new_version")
        if version is None:
            raise RefusedRequest(400, "new_version is required")
        await self._do(lambda: self.engine.set_version(str(version)))
        return _json({"success": True, "new_version": str(version)})

    async def collective_rpc(self, http: web.Request) -> web.Response:
        body = await _body(http)
        if body.get("method") != "reload_weights":
            raise RefusedRequest(400, f"method {body.get('method')!r} is not supported; only reload_weights")
        path = (body.get("kwargs") or {}).get("weights_path", self.service.root)  # as vLLM: else what it started with
        if not isinstance(path, str):
            raise RefusedRequest(400, f"weights_path must be a string, got {path!r}")
        return _json({"results": [await self._do(lambda: self.engine.reload_weights(path))]})

    # --- adapters

    async def load_adapter(self, http: web.Request) -> web.Response:
        body = await _body(http)
        name, path = _needed(body, "lora_name", str), _needed(body, "lora_path", str)
        # Reading and checking needs the file system only; the engine meets the adapter with its first request.
        await asyncio.to_thread(self.service.load_adapter, name, path, bool(body.get("load_inplace")))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, http: web.Request) -> web.Response:
        name = _needed(await _body(http), "lora_name", str)
        self.service.unload_adapter(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

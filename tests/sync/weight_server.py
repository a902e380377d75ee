"""A real HTTP server with real receivers for the sync tests: it holds named tensors and answers from them.

`table` [V, V] makes it a bigram model: the logits of the next token are the row of the last one. `fail_at` makes one
path answer 500, `hang_at` makes one never answer. `python weight_server.py PORT RECEIVER [DTYPE]` runs it as a process of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import threading
from pathlib import Path

import torch
from aiohttp import web
from safetensors.torch import load_file


class WeightServer:
    """Runs in a thread of its own between `start` and `stop`."""

    def __init__(self, receiver: str = "", dtype: str = "float32", port: int = 0):
        self.receiver_path, self.dtype = receiver, dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.manifests: list[dict] = []
        self.init_infos: list[dict] = []
        self.fail_at: str | None = None
        self.hang_at: str | None = None
        self.ignored: set[str] = set()  # names that are received and dropped
        self.is_paused, self.version, self.clear_cache = False, None, None
        self.receiver = None
        self.socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def start(self) -> WeightServer:
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self.loop)
            self.runner = web.AppRunner(self.app(), shutdown_timeout=0.1)
            self.loop.run_until_complete(self.runner.setup())
            self.loop.run_until_complete(web.SockSite(self.runner, self.socket).start())
            ready.set()
            self.loop.run_forever()
            self.loop.run_until_complete(self.runner.cleanup())

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(10)
        return self

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._record])
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/init_weight_transfer_engine", self._init)
        app.router.add_post("/start_weight_update", self._start)
        app.router.add_post("/update_weights", self._update)
        app.router.add_post("/finish_weight_update", self._label)
        app.router.add_post("/update_weight_version", self._label)
        app.router.add_post("/collective_rpc", self._reload)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    @web.middleware
    async def _record(self, request: web.Request, handler) -> web.StreamResponse:
        if request.method == "POST":
            self.calls.append(request.path)
        if request.path == self.fail_at:
            return web.json_response({"error": {"message": "told to fail", "type": "Test", "code": 500}}, status=500)
        if request.path == self.hang_at:
            await asyncio.sleep(60)
        return await handler(request)

    async def _is_paused(self, request: web.Request) -> web.Response:
        return await _json({"is_paused": self.is_paused})

    async def _world_size(self, request: web.Request) -> web.Response:
        return await _json({"world_size": 1})

    async def _start(self, request: web.Request) -> web.Response:
        return await _json({})

    async def _info(self, request: web.Request) -> web.Response:
        return await _json({"vllm_config": {"model_config": {"dtype": f"torch.{self.dtype}"}}})

    async def _pause(self, request: web.Request) -> web.Response:
        self.is_paused, self.clear_cache = True, request.query["clear_cache"]
        return await _json({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.is_paused = False
        return await _json({})

    async def _init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        self.init_infos.append(info)
        module, name = self.receiver_path.rsplit(".", 1)
        receiver = getattr(importlib.import_module(module), name)
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = await asyncio.to_thread(receiver, info, "cpu")
        return await _json({})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        self.manifests.append(info)

        def receive() -> None:
            for name, tensor in self.receiver.receive(info):
                if name not in self.ignored:
                    self.tensors[name] = tensor.clone()

        await asyncio.to_thread(receive)
        return await _json({})

    async def _label(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.version = body["weight_version" if request.path == "/finish_weight_update" else "new_version"]
        return await _json({})

    async def _reload(self, request: web.Request) -> web.Response:
        path = (await request.json())["kwargs"].get("weights_path")
        if path is None:  # what it started with: nothing
            return await _json({})
        folder = Path(path)
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors.update(load_file(file))
        return await _json({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        generator = torch.Generator().manual_seed(params["seed"])
        last, token_ids, content = body["token_ids"][-1], [], []
        for _ in range(params["max_tokens"]):
            logprobs = torch.log_softmax(self.tensors["table"][last].float(), -1)
            last = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            top = torch.topk(logprobs, params["logprobs"]).indices.tolist()
            listed = [{"token_id": i, "logprob": float(logprobs[i])} for i in dict.fromkeys([last, *top])]
            token_ids.append(last)
            content.append({**listed[0], "top_logprobs": listed})
        choice = {"index": 0, "finish_reason": "length", "token_ids": token_ids, "logprobs": {"content": content}}
        return await _json({"choices": [choice]})


async def _json(value: dict) -> web.Response:
    return web.json_response(value)


if __name__ == "__main__":
    server = WeightServer(sys.argv[2], port=int(sys.argv[1])).start()
    print("ready", flush=True)
    server.thread.join()

"""A proxy on loopback that spoils the answers of the server behind it, one kind of fault per sampling request.

    with fault_proxy(url, ["reset", None, "500"]) as proxy: ...     ask proxy.url

`plan` names the fault of each sampling request in turn, None = pass on; after its end everything is passed on. A kind that
ends in ! is repeated for ever. Questions (health, models, metrics) are always passed on, unless the proxy is shut.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import socket
import threading
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

import aiohttp
from aiohttp import web

SAMPLING = ("/inference/v1/generate", "/v1/completions")
ANSWERED = {"500", "502", "429", "reset", "truncated", "malformed", "nothing", "list"}  # may pass: tried again
FINAL = {"400", "404", "too_long", "logprobs", "nan", "nan_head", "infinity", "null", "abort", "empty"}  # never again
SLOW = {"hang", "drip"}  # the time limit of the request ends them


class Proxy:
    """Its thread runs `app`; `shut` and `open` are what a server's end and its restart look like from outside."""

    def __init__(self, upstream: str, plan: Iterable[str | None]):
        self.upstream, self._plan, self._for_ever = upstream, iter(plan), None
        self.counts: collections.Counter[str] = collections.Counter()  # requests by fault, "" = passed on
        self.groups: collections.Counter[int] = collections.Counter()  # requests passed on, by group
        self.headers: list[dict[str, str]] = []  # of the sampling requests
        self.bodies: list[dict[str, Any]] = []  # of the sampling requests
        self.cut = threading.Event()  # a client closed the connection of a slow answer
        self.label: str | None = None  # replaces the version in the answers
        self.retry_after = "0"  # seconds, said with 429
        self.is_unhealthy = False  # /health answers 503
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._runner: web.AppRunner | None = None

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def start(self) -> None:
        self._thread.start()
        self.open()

    def stop(self) -> None:
        self.shut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def open(self) -> None:
        self._do(self._open())

    def shut(self) -> None:
        """Connections are refused, those under way are reset."""
        self._do(self._shut())

    async def _open(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._http = aiohttp.ClientSession()
        self._open_transports: set[asyncio.Transport] = set()
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def _shut(self) -> None:
        if self._runner is not None:
            for transport in self._open_transports:
                transport.abort()
            await self._runner.cleanup()
            await self._http.close()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path not in SAMPLING or request.method != "POST" or await request.read() == b"{}":
            if request.path == "/health" and self.is_unhealthy:
                return web.Response(status=503)
            return await self._pass_on(request)
        self._open_transports.add(request.transport)
        try:
            fault = self._next_fault()
            self.counts[fault] += 1
            self.headers.append(dict(request.headers))
            self.bodies.append(json.loads(await request.read()))
            return await self._answer(request, fault)
        finally:
            self._open_transports.discard(request.transport)

    def _next_fault(self) -> str:
        kind = self._for_ever or next(self._plan, None) or ""
        if kind.endswith("!"):
            self._for_ever = kind
        return kind.rstrip("!")

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        target = self.upstream + request.path_qs
        async with self._http.request(
            request.method, target, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    async def _answer(self, request: web.Request, fault: str) -> web.StreamResponse:
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            return await self._until_cut(asyncio.Event().wait())
        if fault == "too_long":
            text = "This model's maximum context length is 11 tokens. However, you requested 13 tokens"
            return web.json_response({"error": {"message": text}}, status=400)
        if fault.isdigit():
            headers = {"Retry-After": self.retry_after} if fault == "429" else None
            return web.json_response({"error": {"message": f"proxy says {fault}"}}, status=int(fault), headers=headers)
        answer = await self._pass_on(request)
        body = self._spoilt(answer.body, fault)
        if fault == "truncated":
            response = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            request.transport.close()
            return response
        if fault == "drip":
            response = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await response.prepare(request)
            return await self._until_cut(self._drip(response, body))
        if not fault and answer.status == 200:
            self.groups[int(json.loads(await request.read())["request_id"].rsplit("-", 3)[0])] += 1
        return web.Response(body=body, status=answer.status, content_type="application/json")

    async def _drip(self, response: web.StreamResponse, body: bytes) -> web.StreamResponse:
        for i in range(len(body) - 1):  # never whole: only the client's limit ends it
            await response.write(body[i : i + 1])
            await asyncio.sleep(0.02)
        await asyncio.Event().wait()
        return response

    async def _until_cut(self, work: Coroutine[Any, Any, Any]) -> web.StreamResponse:
        try:
            return await work
        except (asyncio.CancelledError, ConnectionError):
            self.cut.set()
            raise

    def _spoilt(self, body: bytes, fault: str) -> bytes:
        if fault == "malformed":
            return body[: len(body) // 2]
        if fault == "nothing":
            return b""
        if fault == "list":
            return b"[]"
        changed = json.loads(body)
        choice = changed["choices"][0]
        content = choice["logprobs"]["content"]
        if fault == "logprobs":
            content.pop()
        elif fault == "nan":
            content[0]["logprob"] = float("nan")  # as Python's json writes it, which is no JSON
        elif fault == "nan_head":
            content[-1]["top_logprobs"][-1]["logprob"] = float("nan")
        elif fault == "infinity":
            content[0]["logprob"] = float("-inf")
        elif fault == "null":
            content[0]["logprob"] = None
        elif fault == "abort":
            choice["finish_reason"] = "abort"
        elif fault == "empty":
            choice["token_ids"], choice["logprobs"] = [], {"content": []}
        if self.label is not None:
            choice["weight_versions"] = [{"version": self.label, "start": 0, "end": len(choice["token_ids"])}]
        return json.dumps(changed).encode()


@contextlib.contextmanager
def fault_proxy(upstream: str, plan: Iterable[str | None] = ()) -> Iterator[Proxy]:
    proxy = Proxy(upstream, plan)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()

"""A loopback HTTP server that speaks the sampling part of the server contract with no model behind it.

Answers are serialised before they are asked for, so that a client is measured and not the server; `POST /stub` makes
it misbehave. As a process: `python -m tests.stub_server --tokens 251` prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from agrpo.lifecycle import die_with_parent

VOCABULARY, EOS = 997, 1


def token_answer(tokens: int, heads: int, seed: int, version: str = "1", mask: int = 0) -> dict:
    """An answer of /inference/v1/generate to a request for `heads` + 1 log-probs, cut as vLLM cuts it (1 for no heads).

    Every third sampled token ranks outside its head, half of those outside what is listed.
    """
    rng = random.Random(seed)
    content, masks = [], []
    for i in range(tokens):
        ids = rng.sample(range(2, VOCABULARY), heads + 2)
        values = sorted((-rng.expovariate(0.3) for _ in ids), reverse=True)
        ranked = [{"token_id": t, "logprob": v, "rank": r + 1} for r, (t, v) in enumerate(zip(ids, values, strict=True))]
        sampled = ranked[heads + i % 2] if i % 3 == 2 or not heads else ranked[rng.randrange(heads)]
        top = [sampled, *(entry for entry in ranked[: heads + 1] if entry is not sampled)][: heads + 1]
        content.append({**sampled, "top_logprobs": top})
        masks.append(sorted({sampled["token_id"], *ids[:mask]}))
    choice = {"index": 0, "finish_reason": "length", "token_ids": [c["token_id"] for c in content]}
    choice |= {"logprobs": {"content": content}, "sampling_mask": masks if mask else None}
    choice["weight_versions"] = [{"version": version, "start": 0, "end": tokens}]
    return {"request_id": "stub", "choices": [choice], "usage": {}}


def text_answer(answer: dict) -> dict:
    """The same answer in the shape of /v1/completions."""
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    heads = max(len(content[0]["top_logprobs"]) - 1, 0)
    kept = [[e for e in c["top_logprobs"] if e["rank"] <= heads or e["rank"] == c["rank"]] for c in content]
    tops = [{f"token_id:{e['token_id']}": e["logprob"] for e in entries} for entries in kept]
    logprobs = {"token_logprobs": [c["logprob"] for c in content], "top_logprobs": tops}
    same = {key: choice[key] for key in ("index", "finish_reason", "token_ids", "weight_versions")}
    return {"choices": [{**same, "logprobs": logprobs}], "usage": {}}


class Stub:
    """The server's state: bodies to give, faults still to commit (the last one for ever if it ends in !), requests seen."""

    def __init__(self, tokens: int, heads: int, bodies: int, token_endpoint: bool, mask: int, versions: bool, vllm: str):
        answers = [token_answer(tokens, heads, seed, mask=mask) for seed in range(bodies)]
        if not versions:
            for answer in answers:
                answer["choices"][0]["weight_versions"] = None
        self.vllm = vllm
        self.bodies = [json.dumps(a).encode() for a in answers]
        self.texts = [json.dumps(text_answer(a)).encode() for a in answers]
        self.token_endpoint, self.faults, self.seen, self.metrics = token_endpoint, [], [], None
        self.num_requests, self.num_in_flight, self.max_in_flight, self.delay_s = 0, 0, 0, 0.0
        self.tokens, self.tokens_per_s, self.free_at = tokens, 0.0, 0.0  # a rate above 0 is that of all requests together

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", lambda _: web.Response())
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", lambda _: web.json_response({"version": self.vllm}))
        app.router.add_get("/metrics", self.load)
        app.router.add_get("/is_paused", lambda _: web.json_response({"is_paused": False}))
        app.router.add_post("/v1/completions", self.generate)
        if self.token_endpoint:
            app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/stub", self.control)
        app.router.add_get("/stub", self.report)
        return app

    async def models(self, _: web.Request) -> web.Response:
        adapter = {"id": "adapter", "parent": "stub", "max_model_len": 11}
        return web.json_response({"data": [adapter, {"id": "stub", "max_model_len": 4099, "parent": None}]})

    async def load(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics is not None else web.Response(status=404)

    async def control(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            setattr(self, name, value)
        return web.Response()

    async def report(self, _: web.Request) -> web.Response:
        names = ("num_requests", "num_in_flight", "max_in_flight", "seen")
        return web.json_response({name: getattr(self, name) for name in names})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if await request.read() == b"{}":
            return web.json_response({"error": {"message": "nothing was asked"}}, status=400)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            return await self.answer(request)
        finally:
            self.num_in_flight -= 1

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        body = await request.read()
        if len(self.seen) < 100:
            self.seen.append(json.loads(body))
        bodies = self.bodies if request.path.startswith("/inference") else self.texts
        answer = bodies[self.num_requests % len(bodies)]
        fault = self.faults[0].rstrip("!") if self.faults else None
        if self.faults and not self.faults[0].endswith("!"):
            self.faults.pop(0)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.tokens_per_s:
            now = asyncio.get_running_loop().time()
            self.free_at = max(self.free_at, now) + self.tokens / self.tokens_per_s
            await asyncio.sleep(self.free_at - now)
        if fault is None:
            return web.Response(body=answer, content_type="application/json")
        return await self.misbehave(fault, request, answer)

    async def misbehave(self, fault: str, request: web.Request, answer: bytes) -> web.StreamResponse:
        if fault == "reset":
            request.transport.abort()
        elif fault == "hang":
            await asyncio.sleep(3600)
        elif fault == "malformed":
            return web.Response(body=answer[: len(answer) // 2], content_type="application/json")
        elif fault.isdigit():
            return web.json_response({"error": {"message": f"stub says {fault}"}}, status=int(fault))
        changed = json.loads(answer)
        choice = changed["choices"][0]
        if fault == "logprobs":
            choice["logprobs"]["content"].pop()
        elif fault == "placeholder":
            choice["logprobs"]["content"][0]["logprob"] = -9999.0
        elif fault == "abort":
            choice["finish_reason"] = "abort"
        elif fault == "candidates":
            choice["sampling_mask"][0] = []
        return web.json_response(changed)


@contextlib.contextmanager
def stub_server(**options: int) -> Iterator[str]:
    """The base URL of a stub in a process of its own, stopped at the end."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stub_server", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def control(url: str, **changes: object) -> None:
    """Set faults (a list of kinds, one per request to come), metrics text or delay of a running stub."""
    data = json.dumps(changes).encode()
    request = urllib.request.Request(url + "/stub", data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def report(url: str) -> dict:
    """Number of sampling requests, most at the same time, and the first hundred bodies."""
    with urllib.request.urlopen(url + "/stub", timeout=10) as answer:
        return json.load(answer)


async def serve(options: argparse.Namespace) -> None:
    stub = Stub(options.tokens, options.heads, options.bodies, bool(options.token_endpoint), options.mask, bool(options.versions),
                options.vllm_version)  # fmt: skip
    runner = web.AppRunner(stub.app(), access_log=None, handler_cancellation=True)  # as real servers: gone is gone
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=7)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--bodies", type=int, default=5)
    parser.add_argument("--token-endpoint", type=int, default=1)
    parser.add_argument("--mask", type=int, default=0)
    parser.add_argument("--vllm-version", default="0.32.0")
    parser.add_argument("--versions", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))

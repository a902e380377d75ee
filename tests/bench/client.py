"""The client alone against a server without latency: generated tokens per second of one core, from both endpoints.

Everything from the request to the checked Turn, 64 requests at a time; the server is a process of its own whose answers
are serialised beforehand. Time is CPU time of this process.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from agrpo.metrics.window import Window
from agrpo.sampler.vllm import Vllm
from tests.stub_server import stub_server

TOKENS, HEADS, AT_ONCE, ROUNDS, LIMIT = 512, 8, 64, 8, 60_000
PROMPT = np.arange(2, 258, dtype=np.int32)


async def _rate(url: str) -> float:
    sampler = Vllm(max_completion_length=TOKENS, num_sampler_logprobs=HEADS)
    client = await sampler.connect((url,), None, 42, lambda: 1, 60.0, AT_ONCE, True, Window())

    async def one(slot: int, rounds: int) -> int:
        return sum([len((await client.generate(PROMPT, (i, slot, 0))).output_ids) for i in range(rounds)])

    async with client:
        await asyncio.gather(*(one(slot, 1) for slot in range(AT_ONCE)))  # connections, imports and caches
        began = time.process_time()
        tokens = sum(await asyncio.gather(*(one(slot, ROUNDS) for slot in range(AT_ONCE))))
        return tokens / (time.process_time() - began)


def run() -> list[dict[str, Any]]:
    bars = []
    for name, token_endpoint, limit in (("client", 1, LIMIT), ("client_completions", 0, None)):
        with stub_server(tokens=TOKENS, heads=HEADS, bodies=16, token_endpoint=token_endpoint) as url:
            value = asyncio.run(_rate(url))
        is_ok = limit is None or value >= limit
        bars.append({"bar": name, "value": round(value), "unit": "tokens/s/core", "limit": limit, "ok": is_ok})
    return bars

"""The questions a server is asked, each with a limit of its own, so that one silent path cannot hide the others (SRV-15)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

LIMIT_S = 10.0
INFO = "/server_info?config_format=json"
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
UPDATE, CALL, LOAD_ADAPTER = "/start_weight_update", "/collective_rpc", "/v1/load_lora_adapter"
READ = ("/version", "/v1/models", INFO, "/is_paused", "/get_world_size", "/metrics")
# Asked with GET though they take POST: 405 says that they are there, and nothing happens.
PRESENT = (UPDATE, CALL, LOAD_ADAPTER)
# Without --enable-scale-out vLLM still has the path and answers 403 to a POST; an empty one is refused otherwise.
EMPTY = {TOKENS: (TOKENS, {})}
ABSENT = (403, 404, 501)
# The first look at the server's facts runs commands there, which take longer than one limit, on a busy machine several.
TRIES = {INFO: 6}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of one request; `error` in words where no answer came."""

    status: int = 0
    body: bytes = b""
    error: str = ""

    @property
    def is_there(self) -> bool:
        return not self.error and self.status not in ABSENT

    def value(self) -> Any:
        """The decoded body of a success; None for anything else."""
        try:
            return json.loads(self.body) if self.status == 200 else None
        except ValueError:
            return None


def ask(url: str, posts: dict[str, tuple[str, Any]], limit_s: float = LIMIT_S) -> dict[str, Answer]:
    """Every answer by path, and of `posts` (name -> path, body) by name; only /health where that fails."""
    return asyncio.run(_ask(url, posts, limit_s))


def post(url: str, posts: dict[str, tuple[str, Any]], limit_s: float = LIMIT_S) -> dict[str, Answer]:
    """More questions: name -> path, body; the answers by name."""
    return asyncio.run(_post(url, posts, limit_s))


async def _ask(url: str, posts: dict[str, tuple[str, Any]], limit_s: float) -> dict[str, Answer]:
    posts = EMPTY | posts
    async with _session(limit_s) as http:
        answers = {"/health": await _answer(http, "GET", url, "/health", None, limit_s)}
        if answers["/health"].status != 200:
            return answers
        names = [*READ, *PRESENT, *posts]
        calls = [_answer(http, "GET", url, path, None, limit_s) for path in (*READ, *PRESENT)]
        calls += [_answer(http, "POST", url, path, body, limit_s) for path, body in posts.values()]
        return answers | dict(zip(names, await asyncio.gather(*calls), strict=True))


async def _post(url: str, posts: dict[str, tuple[str, Any]], limit_s: float) -> dict[str, Answer]:
    async with _session(limit_s) as http:
        calls = [_answer(http, "POST", url, path, body, limit_s) for path, body in posts.values()]
        return dict(zip(posts, await asyncio.gather(*calls), strict=True))


def _session(limit_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s))


async def _answer(http: Any, method: str, url: str, path: str, body: Any, limit_s: float) -> Answer:
    for attempt in range(TRIES.get(path, 1)):
        try:
            async with http.request(method, url + path, json=body) as answer:
                return Answer(answer.status, await answer.read())
        except TimeoutError:
            error = f"{method} {path}: no answer within {limit_s * (attempt + 1):g} s"
        except (aiohttp.ClientError, OSError, ValueError) as cause:
            return Answer(error=f"{method} {path}: {type(cause).__name__}: {cause}")
    return Answer(error=error)

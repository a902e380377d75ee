"""HTTP to the servers: short questions, sampling requests, and what each failure means for a next try."""

from __future__ import annotations

import re
import time
from typing import Any

import aiohttp
import msgspec

from agrpo.errors import RolloutFailure, ServerError

CONNECT_LIMIT_S = 10.0
_CONTEXT_EXCEEDED = re.compile(r"maximum (context|model) length|longer than the maximum|max_model_len", re.I)


class Unreachable(ServerError):
    """The server did not answer this time."""


class Retryable(Exception):
    """The request may succeed when sent again."""

    def __init__(self, reason: str, text: str, drains: bool = False, after_s: float = 0.0):
        """`drains`: the server takes no requests for now; `after_s`: the time it asked to be left alone."""
        super().__init__(text)
        self.reason, self.text, self.drains, self.after_s = reason, text, drains, after_s


class Connection:
    """Two pools: one for sampling, and one for questions, which must not wait while every connection is generating."""

    def __init__(self, timeout_s: float, max_connections: int):
        self._timeout_s = timeout_s
        self.answered_at: float | None = None  # time.monotonic() of the last answer to a sampling request
        self.num_answers = 0
        self._connect_s = connect_s = min(CONNECT_LIMIT_S, timeout_s)
        # A long answer has about 600 bytes per token; a small read buffer would stop and start its transfer often.
        self._sampling = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
            read_bufsize=1 << 22,
        )
        self._questions = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=connect_s))

    async def close(self) -> None:
        await self._sampling.close()
        await self._questions.close()

    async def get(self, url: str, path: str) -> bytes | None:
        """The body of a GET; None where the server does not offer the path. Unreachable in every other case."""
        status, body = await self.answer(url, path)
        if status in (404, 405):
            return None
        if status != 200:
            raise Unreachable(f"GET {url}{path} answered {status}: {body[:500].decode(errors='replace')}")
        return body

    async def get_json(self, url: str, path: str) -> dict[str, Any]:
        """The object in the body of a GET, empty where the server does not offer the path."""
        body = await self.get(url, path)
        if body is None:
            return {}
        try:
            value = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerError(f"{url}{path} did not answer with JSON: {error}") from error
        if not isinstance(value, dict):
            raise ServerError(f"{url}{path} did not answer with a JSON object, got {type(value).__name__}")
        return value

    async def answer(self, url: str, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST of {}."""
        try:
            async with self._questions.request(method, url + path, json={} if method == "POST" else None) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{method} {url}{path} failed: {type(error).__name__}: {error}") from error

    async def sample(self, url: str, body: dict[str, Any], headers: dict[str, str], is_probe: bool = False) -> bytes:
        """The body of a sampling request's answer; Retryable, or RolloutFailure with the server's own text."""
        session = self._questions if is_probe else self._sampling
        try:
            async with session.post(url, data=msgspec.json.encode(body), headers=headers) as answer:
                content = await answer.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise Retryable("connection", f"{url}: no connection in {self._connect_s:g} s") from error
        except TimeoutError as error:
            raise Retryable("timeout", f"{url} gave no answer in {self._timeout_s:g} s (server.timeout)") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Retryable("connection", f"{url}: {type(error).__name__}: {error}") from error
        self.answered_at = time.monotonic()
        self.num_answers += 1
        if answer.status == 200:
            return content
        text = f"{url} answered {answer.status}: {content[:2000].decode(errors='replace')}"
        if answer.status == 429 or answer.status >= 500:
            raise Retryable("unavailable", text, answer.status == 503, _seconds(answer.headers.get("Retry-After")))
        raise RolloutFailure("prompt_too_long" if _CONTEXT_EXCEEDED.search(text) else "rejected", text)


def _seconds(header: str | None) -> float:
    """The wait in a Retry-After header; 0 where it is absent or a date."""
    return float(header) if header is not None and header.strip().isdigit() else 0.0

"""`sampler=vllm`: the settings of sampling, and the client of one server or several over HTTP.

A request is one turn. It is retried where the server or the network may have failed (GEN-11), never where the request was
refused (GEN-12). Every answer is checked before it becomes a Turn; what cannot be trained on is a RolloutFailure.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from agrpo.errors import RolloutFailure, ServerError
from agrpo.sampler.answer import Expected, turn_of_text, turn_of_tokens
from agrpo.sampler.load import ServerLoad, load_of
from agrpo.schema import setting
from agrpo.types import Turn

TOKEN_PATH, TEXT_PATH = "/inference/v1/generate", "/v1/completions"


class RequestKey(NamedTuple):
    """Which request this is; with the run's seed it decides the request's seed. Any tuple of these three will do."""

    group_id: int
    slot: int
    turn: int


def request_seed(run_seed: int, key: RequestKey | tuple[int, int, int], attempt: int) -> int:
    """63 bits, different for every request and attempt of a run, the same in a repeated run (GEN-4)."""
    digest = hashlib.blake2b(struct.pack("<5q", run_seed, *key, attempt), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """Sampling settings and the client that uses them."""

    max_completion_length: int = setting(2048, "generated tokens per request, that is per turn", ge=1)
    temperature: float = setting(1.0, "sampling temperature", ge=0.01)
    top_p: float = setting(1.0, "nucleus sampling; below 1 needs top_k", gt=0, le=1)
    top_k: int = setting(0, "sample from the k most likely tokens; 0 = off", ge=0)
    min_p: float | None = setting(None, "least probability relative to the most likely token; needs top_k", ge=0, le=1)
    num_sampler_logprobs: int = setting(8, "head log-probs kept per token when the loss centers scores", ge=1)
    chat_template_kwargs: dict[str, Any] | None = setting(None, "passed to every rendering of the chat template")
    clamp_max_tokens: bool = setting(True, "ask for no more tokens than fit into the server's context")
    require_prefix_template: bool = setting(True, "refuse templates that re-render history when tools are used")
    max_retries: int = setting(5, "retries of a request after connection errors, time-outs, HTTP 429 and 5xx", ge=0)

    @property
    def is_truncated(self) -> bool:
        """Tokens are drawn from a candidate set instead of the whole vocabulary (SAMP-1)."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)

    def problems(self, config: Any) -> list[str]:
        lines = []
        if self.top_k == 0 and self.top_p < 1:
            lines.append(f"sampler.top_p={self.top_p:g} needs sampler.top_k > 0, which bounds the candidate set")
        if self.top_k == 0 and self.min_p:
            lines.append(f"sampler.min_p={self.min_p:g} needs sampler.top_k > 0, which bounds the candidate set")
        return lines

    async def connect(
        self,
        urls: tuple[str, ...],
        model_name: str | None,
        run_seed: int,
        version: Callable[[], int],
        timeout_s: float,
        max_connections: int,
        centering: bool,
        metrics: Any,
        retry_wait_s: float = 1.0,
    ) -> Client:
        """A client of the running servers; ServerError if one lacks what is needed, or is silent for `timeout_s`."""
        client = Client(
            self, urls, model_name, run_seed, version, timeout_s, max_connections, centering, metrics, retry_wait_s
        )
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    await client.look_up()
                    return client
                except Unreachable:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(retry_wait_s)
        except BaseException:
            await client.close()
            raise


class Unreachable(ServerError):
    """The server did not answer this time."""


class Client:
    """`generate` for every rollout of a run; one group always asks the same server, so that its prefix is cached once."""

    def __init__(
        self, sampler, urls, model_name, run_seed, version, timeout_s, max_connections, centering, metrics, retry_wait_s
    ):
        self.sampler, self.urls, self.model_name = sampler, [u.rstrip("/") for u in urls], model_name
        self.max_model_len = 0  # tokens, set by look_up
        self._run_seed, self._version, self._metrics = run_seed, version, metrics
        self._timeout_s, self._retry_wait_s = timeout_s, retry_wait_s
        self._num_heads = sampler.num_sampler_logprobs if centering else 0
        self._speaks_tokens: dict[str, bool] = {}
        self._answered_at: float | None = None
        # A long answer has about 600 bytes per token; a small read buffer would stop and start its transfer often.
        connector = aiohttp.TCPConnector(limit=max_connections, limit_per_host=0)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s), read_bufsize=1 << 22
        )
        # Polls must not wait for a connection while every one of them is generating.
        self._control = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=min(10.0, timeout_s)))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()
        await self._control.close()

    async def look_up(self) -> None:
        """Model name and context length (SRV-10), and which endpoint each server offers."""
        lengths = []
        for url in self.urls:
            entries = _decoded(await self._get(url, "/v1/models"), url + "/v1/models").get("data") or []
            entry = _base_entry(entries, self.model_name)
            if entry is None:
                served = ", ".join(e.get("id", "?") for e in entries) or "nothing"
                raise ServerError(f"{url} serves {served}, not server.model_name={self.model_name}")
            self.model_name = self.model_name or entry["id"]
            lengths.append(int(entry.get("max_model_len") or 0))
            # A GET of a path that takes only POST answers 405, a missing one 404.
            self._speaks_tokens[url] = await self._status(url, TOKEN_PATH) != 404
            if self.sampler.is_truncated and not self._speaks_tokens[url]:
                raise ServerError(
                    f"sampler.top_k={self.sampler.top_k} needs candidate sets, but {url} has no {TOKEN_PATH}; start vLLM "
                    "0.28 or newer with --return-sampling-mask --enable-scale-out (VLLM_USE_V2_MODEL_RUNNER=1 if it "
                    "rejects the flag)"
                )
        self.max_model_len = min(lengths)
        if self.max_model_len < 2:
            raise ServerError(f"{self.urls[0]}/v1/models reports no max_model_len for {self.model_name}")

    async def server_info(self) -> dict[str, Any]:
        """What the first server says about itself; empty where it does not offer the endpoint."""
        body = await self._get(self.urls[0], "/server_info?config_format=json")
        return {} if body is None else _decoded(body, "/server_info")

    async def _get(self, url: str, path: str) -> bytes | None:
        """The body of a GET; None where the server does not offer the path. Unreachable in every other case."""
        status, body = await self._answer(url, path)
        if status in (404, 405):
            return None
        if status != 200:
            raise Unreachable(f"GET {url}{path} answered {status}: {body[:500].decode(errors='replace')}")
        return body

    async def _status(self, url: str, path: str) -> int:
        return (await self._answer(url, path))[0]

    async def _answer(self, url: str, path: str) -> tuple[int, bytes]:
        try:
            async with self._control.get(url + path) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"GET {url}{path} failed: {type(error).__name__}: {error}") from error

    async def generate(
        self,
        prompt_ids: np.ndarray,
        key: RequestKey | tuple[int, int, int],
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Turn:
        """Sample one turn after `prompt_ids` ([p] int32); RolloutFailure with a typed reason if it cannot be had."""
        limit = max_tokens or self.sampler.max_completion_length
        room = self.max_model_len - len(prompt_ids)
        if self.sampler.clamp_max_tokens:
            if room <= 0:
                text = f"{len(prompt_ids)} tokens, but the server's context is {self.max_model_len}"
                raise RolloutFailure("prompt_too_long", text)
            limit = min(limit, room)
        request = self._request(prompt_ids, limit, temperature)
        deadline = time.monotonic() + 2 * self._timeout_s
        for attempt in range(self.sampler.max_retries + 1):
            try:
                return await self._attempt(prompt_ids, key, request, attempt)
            except _Retryable as error:
                wait = self._retry_wait_s * min(2**attempt, 16) * random.uniform(1.0, 1.25)
                if attempt == self.sampler.max_retries or time.monotonic() + wait > deadline:
                    raise RolloutFailure(error.reason, f"{error.text} ({attempt + 1} tries)") from error
                self._metrics.add("rollout/vllm_retry_count", 1)
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _request(self, prompt_ids: np.ndarray, limit: int, temperature: float | None) -> dict[str, Any]:
        """Everything of the request but its seed. All sampling settings are stated: server defaults never apply (GEN-6)."""
        s = self.sampler
        params = {
            "temperature": s.temperature if temperature is None else temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p or 0.0,
            "max_tokens": limit,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": self._num_heads,
        }
        return {"prompt": prompt_ids.tolist(), "params": params}

    async def _attempt(self, prompt_ids: np.ndarray, key, request: dict[str, Any], attempt: int) -> Turn:
        group_id, slot, turn = key
        url = self.urls[(group_id + attempt) % len(self.urls)]
        params = {**request["params"], "seed": request_seed(self._run_seed, key, attempt)}
        # The most likely token (temperature 0, an evaluation) is drawn from no candidate set.
        has_candidates = self.sampler.is_truncated and params["temperature"] > 0
        expected = Expected(prompt_ids, self._num_heads, has_candidates, self._version())
        if self._speaks_tokens[url]:
            request_id = f"{group_id}-{slot}-{turn}-{attempt}"
            body = {"request_id": request_id, "model": self.model_name, "token_ids": request["prompt"]}
            return turn_of_tokens(await self._post(url + TOKEN_PATH, {**body, "sampling_params": params}), expected)
        body = {"model": self.model_name, "prompt": request["prompt"], "n": 1, **params}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return turn_of_text(await self._post(url + TEXT_PATH, body), expected)

    async def _post(self, url: str, body: dict[str, Any]) -> bytes:
        try:
            headers = {"Content-Type": "application/json"}
            async with self._http.post(url, data=msgspec.json.encode(body), headers=headers) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise _Retryable("timeout", f"{url} gave no answer in {self._timeout_s:g} s (server.timeout)") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Retryable("connection", f"{url}: {type(error).__name__}: {error}") from error
        self._answered_at = time.monotonic()
        if answer.status == 200:
            return content
        text = f"{url} answered {answer.status}: {content[:2000].decode(errors='replace')}"
        if answer.status == 429 or answer.status >= 500:
            raise _Retryable("unavailable", text)
        raise RolloutFailure("rejected", text)

    async def poll_load(self) -> ServerLoad | None:
        """The servers' load now; None without a metrics endpoint (CONC-9). ServerError for a failed poll."""
        pages, paused = [], False
        for url in self.urls:
            page = await self._get(url, "/metrics")
            if page is None:
                return None
            pages.append(page.decode(errors="replace"))
            state = await self._get(url, "/is_paused")
            paused |= state is not None and bool(msgspec.json.decode(state).get("is_paused"))
        return load_of(pages, paused)

    def last_answer_text(self) -> str:
        """When a server last answered a request, in words."""
        if self._answered_at is None:
            return "no server has answered a request yet"
        return f"the last answer of a server was {time.monotonic() - self._answered_at:.0f} s ago"


class _Retryable(Exception):
    """The request may succeed when sent again."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason, self.text = reason, text


def _decoded(body: bytes | None, path: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body or b"")
    except msgspec.MsgspecError as error:
        raise ServerError(f"{path} did not answer with JSON: {error}") from error


def _base_entry(entries: list[dict[str, Any]], model_name: str | None) -> dict[str, Any] | None:
    """The entry of the base model; adapters are listed with a parent (SRV-10)."""
    if model_name is not None:
        return next((e for e in entries if e.get("id") == model_name), None)
    return next((e for e in entries if not e.get("parent")), None)

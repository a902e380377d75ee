"""The client of one server or several: `generate` gives one turn, `poll_load` the servers' load.

A failed try is followed by another one where the server or the network may have failed (GEN-11), never where the request
was refused (GEN-12). What ends the tries:

    it was answered     5xx, 429, time-out, broken answer, or a reset by a server that is well: `max_retries` of them
    it was not          no server is up, or none has the run's weights: `server.timeout` after the first failure

Every answer is checked before it becomes a Turn; what cannot be trained on is a RolloutFailure.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import random
import re
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from agrpo.errors import RolloutFailure, ServerError
from agrpo.sampler.answer import Expected, Unsynced, turn_of_text, turn_of_tokens
from agrpo.sampler.connection import Connection, Retryable, Unreachable
from agrpo.sampler.load import ServerLoad, load_of, num_engines
from agrpo.sampler.servers import Server, Servers
from agrpo.sampler.tries import Tries
from agrpo.types import Turn

TOKEN_PATH, TEXT_PATH = "/inference/v1/generate", "/v1/completions"
FIRST_WITH_CANDIDATES = (0, 28)  # version of vLLM
_log = logging.getLogger(__name__)


class RequestKey(NamedTuple):
    """Which request this is; with the run's seed it decides the request's seed. Any tuple of these three will do."""

    group_id: int
    slot: int
    turn: int


Key = RequestKey | tuple[int, int, int]


def request_seed(run_seed: int, key: Key, attempt: int) -> int:
    """63 bits, different for every request and attempt of a run, the same in a repeated run (GEN-4)."""
    digest = hashlib.blake2b(struct.pack("<5q", run_seed, *key, attempt), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Client:
    """`generate` for every rollout of a run."""

    def __init__(
        self,
        sampler: Any,
        urls: tuple[str, ...],
        model_name: str | None,
        run_seed: int,
        version: Callable[[], int],
        timeout_s: float,
        max_connections: int,
        centering: bool,
        metrics: Any,
        retry_wait_s: float,
        is_synced: bool = False,
        salts_cache: bool = False,
    ):
        self.sampler, self.urls, self.model_name = sampler, [u.rstrip("/") for u in urls], model_name
        self.max_model_len = 0  # tokens, set by look_up
        self.is_synced, self.salts_cache = is_synced, salts_cache
        self._http = Connection(timeout_s, max_connections)
        self._servers = Servers(self.urls, self._looks_well, retry_wait_s)
        self._run_seed, self._version, self._metrics = run_seed, version, metrics
        self._timeout_s, self._retry_wait_s = timeout_s, retry_wait_s
        self._num_heads = sampler.num_sampler_logprobs if centering else 0
        self._has_candidates = sampler.is_truncated

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._servers.close()
        await self._http.close()

    async def look_up(self) -> None:
        """Model name and context length (SRV-10), and which endpoint and how many engines each server offers."""
        lengths = []
        for server in self._servers.all:
            url = server.url
            entries = (await self._http.get_json(url, "/v1/models")).get("data") or []
            entry = _base_entry(entries, self.model_name)
            if entry is None:
                served = ", ".join(e.get("id", "?") for e in entries) or "nothing"
                raise ServerError(f"{url} serves {served}, not server.model_name={self.model_name}")
            self.model_name = self.model_name or entry["id"]
            lengths.append(int(entry.get("max_model_len") or 0))
            # An empty request is refused: with 403 by a vLLM without --enable-scale-out, with 404 where the path is missing.
            server.speaks_tokens = (await self._http.answer(url, TOKEN_PATH, "POST"))[0] not in (403, 404)
            if self._has_candidates:
                self._has_candidates = await self._gives_candidates(server)
            server.num_engines = num_engines((await self._http.get(url, "/metrics") or b"").decode(errors="replace"))
        self.max_model_len = min(lengths)
        if self.max_model_len < 2:
            raise ServerError(f"{self.urls[0]}/v1/models reports no max_model_len for {self.model_name}")

    async def _gives_candidates(self, server: Server) -> bool:
        """Whether truncated sampling can ask for candidate sets: false for a vLLM too old to know them (SAMP-6)."""
        version = str((await self._http.get_json(server.url, "/version")).get("version") or "")
        if version[:1].isdigit() and tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < FIRST_WITH_CANDIDATES:
            _log.warning(
                "%s runs vLLM %s, which gives no candidate sets: ratios are normalised over the whole vocabulary and biased by "
                "what sampler.top_k=%d, top_p and min_p cut off; run: pip install -U vllm",
                server.url, version, self.sampler.top_k,
            )  # fmt: skip
            return False
        if server.speaks_tokens:
            return True
        raise ServerError(
            f"sampler.top_k={self.sampler.top_k} needs candidate sets, but {server.url} has no {TOKEN_PATH}; start vLLM "
            "0.28 or newer with --return-sampling-mask --enable-scale-out (VLLM_USE_V2_MODEL_RUNNER=1 if it rejects the flag)"
        )

    async def server_info(self) -> dict[str, Any]:
        """What the first server says about itself; empty where it does not offer the endpoint."""
        return await self._http.get_json(self.urls[0], "/server_info?config_format=json")

    async def generate(
        self,
        prompt_ids: np.ndarray,
        key: Key,
        max_tokens: int | None = None,
        temperature: float | None = None,
        model: str | None = None,
    ) -> Turn:
        """Sample one turn after `prompt_ids` ([p] int32); RolloutFailure with a typed reason if it cannot be had.

        `model` names an adapter, null the served model itself.
        """
        request = self._request(prompt_ids, self._limit(prompt_ids, max_tokens), temperature)
        request["model"] = model or self.model_name
        tries = Tries(self.sampler.max_retries, self._timeout_s, self._retry_wait_s)
        for attempt in itertools.count():
            server = await self._server(key[0], tries)
            if attempt:
                self._metrics.add("rollout/vllm_retry_count", 1)
            try:
                return await self._attempt(server, prompt_ids, key, request, attempt)
            except (Retryable, Unsynced) as error:
                tries.failed(server, error)
            if tries.error.drains:
                self._servers.take_down(server, tries.error.text)
            elif await self._servers.is_well(server, tries.error.text):
                await tries.wait()
        raise AssertionError("a try returns or raises")

    def _limit(self, prompt_ids: np.ndarray, max_tokens: int | None) -> int:
        """The tokens to ask for: what fits into the context (GEN-15)."""
        limit = max_tokens or self.sampler.max_completion_length
        if not self.sampler.clamp_max_tokens:
            return limit
        room = self.max_model_len - len(prompt_ids)
        if room <= 0:
            text = f"{len(prompt_ids)} tokens, but the server's context is {self.max_model_len}"
            raise RolloutFailure("prompt_too_long", text)
        return min(limit, room)

    async def _server(self, group_id: int, tries: Tries) -> Server:
        """The server for the next try, waited for while all are down."""
        while (server := self._servers.of(group_id, tries.failed_on)) is None:
            if not await self._servers.wait_for_one(tries.deadline):
                down = "; ".join(f"{s.url}: {s.down}" for s in self._servers.all if s.down)
                text = f"no server was up for {self._timeout_s:g} s (server.timeout): {down}"
                raise RolloutFailure(tries.error.reason if tries.error else "unreachable", text) from tries.error
            # Not all at once: everybody has waited for this moment.
            await asyncio.sleep(self._retry_wait_s * random.random())
        return server

    def _request(self, prompt_ids: np.ndarray, limit: int, temperature: float | None) -> dict[str, Any]:
        """Everything of the request but its seed. All sampling settings are stated: server defaults never apply (GEN-6)."""
        asked = {} if temperature is None else {"temperature": temperature}
        params = {
            **self.sampler.distribution,
            **asked,
            "max_tokens": limit,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": self._num_heads,
        }
        return {"model": self.model_name, "prompt": prompt_ids.tolist(), "params": params}

    async def _attempt(self, server: Server, prompt_ids: np.ndarray, key: Key, request: dict, attempt: int) -> Turn:
        # The most likely token (temperature 0, an evaluation) is drawn from no candidate set.
        has_candidates = self._has_candidates and request["params"]["temperature"] > 0
        # A try after an outage is stamped anew: the version known now, not the one of the first try.
        expected = self._expected(server, prompt_ids, self._num_heads, has_candidates)
        try:
            turn = await self._sample(server, key, request, attempt, expected)
        except RolloutFailure as failure:
            if failure.reason == "malformed":
                raise Retryable(failure.reason, f"{server.url}: {failure.text}") from failure
            if failure.reason == "prompt_too_long" and not self.sampler.clamp_max_tokens:
                raise RolloutFailure(
                    "rejected", failure.text
                ) from failure  # the limit asked for was the user's (GEN-16)
            raise
        server.is_labelled |= turn.is_labelled
        server.num_relapses = 0
        return turn

    def _expected(self, server: Server, prompt_ids: np.ndarray, num_heads: int, has_candidates: bool) -> Expected:
        return Expected(prompt_ids, num_heads, has_candidates, self._version(), self.is_synced, server.is_labelled)

    async def _sample(
        self, server: Server, key: Key, request: dict, attempt: int, expected: Expected, is_probe: bool = False
    ) -> Turn:
        """One try at one server."""
        group_id, slot, turn = key
        params = {**request["params"], "seed": request_seed(self._run_seed, key, attempt)}
        headers = {"Content-Type": "application/json"}
        if (engine := server.engine_of(group_id, len(self.urls))) is not None:
            headers["X-data-parallel-rank"] = str(engine)
        if server.speaks_tokens:
            request_id = f"{group_id}-{slot}-{turn}-{attempt}"
            body = {"request_id": request_id, "model": request["model"], "token_ids": request["prompt"]}
            # One more than is kept: the sampled token takes a place of its own in the list (GEN-9).
            body["sampling_params"] = {**params, "logprobs": params["logprobs"] + 1} if params["logprobs"] else params
            body |= self._salt(expected)
            return turn_of_tokens(await self._http.sample(server.url + TOKEN_PATH, body, headers, is_probe), expected)
        body = {"model": request["model"], "prompt": request["prompt"], "n": 1, **params}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **self._salt(expected)}
        return turn_of_text(await self._http.sample(server.url + TEXT_PATH, body, headers, is_probe), expected)

    def _salt(self, expected: Expected) -> dict[str, str]:
        """A prefix cache of its own for each version, where syncs leave the caches as they are (SYNC-13)."""
        return {"cache_salt": str(expected.version)} if self.salts_cache else {}

    async def _looks_well(self, server: Server) -> bool:
        """Healthy, and before it is used again with weights of a version: one token is asked for to see its label."""
        try:
            await self._http.get(server.url, "/health")
            if server.down is not None and server.speaks_tokens and (server.is_labelled or self.is_synced):
                prompt_ids = np.ones(1, np.int32)
                request = self._request(prompt_ids, 1, None)
                request["params"]["logprobs"] = 0
                key = RequestKey(-1, server.num_relapses, time.monotonic_ns())
                await self._sample(server, key, request, 0, self._expected(server, prompt_ids, 0, False), is_probe=True)
        except (Unreachable, Unsynced, Retryable):
            return False
        except RolloutFailure:
            pass  # it answered; whether real requests succeed is seen by them
        return True

    async def poll_load(self) -> ServerLoad | None:
        """The load now of the servers that are up; None without a metrics endpoint (CONC-9). ServerError if it fails."""
        pages, paused = {}, False
        for url in [s.url for s in self._servers.up] or self.urls:
            page = await self._http.get(url, "/metrics")
            if page is None:
                return None
            pages[url] = page.decode(errors="replace")
            paused |= bool((await self._http.get_json(url, "/is_paused")).get("is_paused"))
        return load_of(pages, paused)

    @property
    def is_cut_off(self) -> bool:
        """No server is up, or none has the run's weights; every request waits for one, `server.timeout` at most."""
        return not self._servers.up

    @property
    def num_answers(self) -> int:
        """Answers to sampling requests so far, whatever they were worth."""
        return self._http.num_answers

    def last_answer_text(self) -> str:
        """When a server last answered a request, and which are down, in words."""
        answered_at = self._http.answered_at
        text = "no server has answered a request yet"
        if answered_at is not None:
            text = f"the last answer of a server was {time.monotonic() - answered_at:.0f} s ago"
        return "; ".join([text, *(f"{s.url} is down: {s.down}" for s in self._servers.all if s.down)])


def _base_entry(entries: list[dict[str, Any]], model_name: str | None) -> dict[str, Any] | None:
    """The entry of the base model; adapters are listed with a parent (SRV-10)."""
    if model_name is not None:
        return next((e for e in entries if e.get("id") == model_name), None)
    return next((e for e in entries if not e.get("parent")), None)

"""`sampler=vllm`: the settings of sampling, and how the client that uses them is connected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agrpo.schema import setting

if TYPE_CHECKING:
    from agrpo.sampler.client import Client


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
    max_retries: int = setting(
        5, "retries of a request after errors, resets and time-outs of a server that is up", ge=0
    )

    @property
    def distribution(self) -> dict[str, float]:
        """What the sampled distribution is, by the names that requests use."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p or 0.0}

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
        is_synced: bool = False,
        salts_cache: bool = False,
    ) -> Client:
        """A client of the running servers; ServerError if one lacks what is needed, or is silent for `timeout_s`.

        `is_synced`: the run has sent its weights, so tokens of any other weights are refused and asked for again.
        `salts_cache`: requests of different versions share no prefix cache.
        """
        from agrpo.sampler.client import Client
        from agrpo.sampler.connection import Unreachable

        client = Client(
            self, urls, model_name, run_seed, version, timeout_s, max_connections, centering, metrics, retry_wait_s,
            is_synced, salts_cache,
        )  # fmt: skip
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

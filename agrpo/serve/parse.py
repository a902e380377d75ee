"""Request bodies to engine requests; what cannot be served is refused with the reason (GEN-12)."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass
from typing import Any

from agrpo.serve.sampling import SamplingParams

# A value other than these would change the answer, and the engine does not know how.
_NEUTRAL = {
    "n": 1, "best_of": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stream": False,
    "echo": False, "stop": None, "logit_bias": None, "allowed_token_ids": None, "bad_words": None, "suffix": None,
    "min_tokens": 0, "prompt_logprobs": None, "structured_outputs": None, "use_beam_search": False,
}  # fmt: skip


class RefusedRequest(Exception):
    """An answer other than 200, with its HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Parsed:
    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int]


def parse_generate(body: dict, limits: Limits) -> Parsed:
    """`/inference/v1/generate`: max_tokens is clipped to the context; only a full prompt is refused (SAMP-10)."""
    settings = body.get("sampling_params") or {}
    if not isinstance(settings, dict):
        raise RefusedRequest(400, f"sampling_params must be an object, got {settings!r}")
    prompt_ids = _prompt(body.get("token_ids"), "token_ids", limits)
    room = limits.max_model_len - len(prompt_ids)
    max_tokens = _number(settings, "max_tokens", None, int, 1, None)
    max_tokens = room if max_tokens is None else min(max_tokens, room)
    return _parsed(body, settings | {"stream": body.get("stream", False)}, prompt_ids, max_tokens, limits)


def parse_completion(body: dict, prompt_ids: Any, limits: Limits) -> Parsed:
    """`/v1/completions`: a prompt and max_tokens beyond the context are refused together."""
    prompt_ids = _prompt(prompt_ids, "prompt", limits)
    max_tokens = _number(body, "max_tokens", 16, int, 1, None)
    if len(prompt_ids) + max_tokens > limits.max_model_len:
        raise RefusedRequest(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{max_tokens} output tokens and your prompt contains {len(prompt_ids)} tokens; reduce one of them.",
        )
    return _parsed(body, body, prompt_ids, max_tokens, limits)


def _parsed(body: dict, settings: dict, prompt_ids: list[int], max_tokens: int, limits: Limits) -> Parsed:
    for name, neutral in _NEUTRAL.items():
        value = settings.get(name, neutral)
        if value is not None and value != neutral:
            raise RefusedRequest(400, f"{name}={value!r} is not supported by the embedded server; only {neutral!r}")
    stop_ids = frozenset() if settings.get("ignore_eos") else limits.stop_ids
    stop_ids |= frozenset(settings.get("stop_token_ids") or [])
    request_id = body.get("request_id") or uuid.uuid4().hex
    return Parsed(str(request_id), prompt_ids, max_tokens, _params(settings, limits), stop_ids)


def _params(settings: dict, limits: Limits) -> SamplingParams:
    seed = _number(settings, "seed", None, int, None, None)
    num_logprobs = _number(settings, "logprobs", 0, int, 0, None)
    if num_logprobs > limits.max_logprobs:
        raise RefusedRequest(
            400,
            f"Requested sample logprobs of {num_logprobs}, which is greater than max allowed: {limits.max_logprobs}",
        )
    top_p = _number(settings, "top_p", 1.0, float, 0, 1)
    if top_p == 0:
        raise RefusedRequest(400, "top_p must be in (0, 1], got 0")
    return SamplingParams(
        temperature=_number(settings, "temperature", 1.0, float, 0, None),
        top_k=max(0, _number(settings, "top_k", 0, int, -1, None)),  # vLLM reads -1 and 0 as off
        top_p=top_p,
        min_p=_number(settings, "min_p", 0.0, float, 0, 1),
        seed=secrets.randbits(63) if seed is None else seed,
        num_logprobs=num_logprobs,
    )


def _prompt(ids: Any, name: str, limits: Limits) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise RefusedRequest(400, f"{name} must be a non-empty list of token ids")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RefusedRequest(400, f"Token id {wrong} is out of vocabulary (size {limits.vocab_size})")
    if len(ids) >= limits.max_model_len:
        raise RefusedRequest(
            400,
            f"The prompt has {len(ids)} tokens, which leaves no room to generate: this model's maximum context length "
            f"is {limits.max_model_len} tokens.",
        )
    return ids


def _number(settings: dict, name: str, default: Any, kind: type, low: float | None, high: float | None) -> Any:
    value = settings.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and value != int(value)) or value != value:
        raise RefusedRequest(400, f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RefusedRequest(400, f"{name} must be {bounds}, got {value!r}")
    return kind(value)

"""Finished requests to response bodies, in the shapes of vLLM's two endpoints."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from agrpo.serve.request import Request


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int


class Position(msgspec.Struct):
    """One generated token; `top_logprobs` lists it first, then the ranked head without it (GEN-9)."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[TokenLogprob]


def generate_answer(request: Request) -> dict[str, Any]:
    content = [
        Position(request.output_ids[i], request.logprobs[i], request.ranks[i], _head(request, i))
        for i in range(len(request.output_ids))
    ]
    choice = {
        "index": 0,
        "finish_reason": request.finish_reason,
        "stop_reason": None,
        "token_ids": request.output_ids,
        "logprobs": {"content": content},
        "sampling_mask": request.candidates if request.params.is_truncated else None,
        "weight_versions": _versions(request),
    }
    return {"request_id": request.request_id, "choices": [choice], "usage": _usage(request)}


def completion_answer(request: Request, body: dict, model: str, tokenizer) -> dict[str, Any]:
    """The OpenAI shape; token texts are `token_id:N` where asked for, or where there is no tokenizer."""
    as_ids = body.get("return_tokens_as_token_ids") or tokenizer is None

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else tokenizer.decode([token_id])

    choice: dict[str, Any] = {
        "index": 0,
        "text": tokenizer.decode(request.output_ids, skip_special_tokens=True) if tokenizer is not None else "",
        "finish_reason": request.finish_reason,
        "stop_reason": None,
        "logprobs": None,
        "weight_versions": _versions(request),
    }
    if body.get("return_token_ids"):
        choice |= {"token_ids": request.output_ids, "prompt_token_ids": request.prompt_ids}
    if body.get("logprobs") is not None:
        heads = [_head(request, i) for i in range(len(request.output_ids))]
        choice["logprobs"] = {
            "tokens": [name(t) for t in request.output_ids],
            "token_logprobs": request.logprobs,
            "top_logprobs": [{name(e.token_id): e.logprob for e in head} for head in heads],
            "text_offset": [],
        }
    return {
        "id": f"cmpl-{request.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": _usage(request),
    }


def _head(request: Request, index: int) -> list[TokenLogprob]:
    """The sampled token, then the ranked head without it; entries outside the candidate set do not exist."""
    sampled = request.output_ids[index]
    entries = [TokenLogprob(sampled, request.logprobs[index], request.ranks[index])]
    k = request.params.num_logprobs
    if k:
        ids, logprobs = request.head_ids[index][:k], request.head_logprobs[index][:k]
        rank = 0
        for token_id, logprob in zip(ids, logprobs, strict=True):
            rank += 1
            if token_id != sampled and logprob != -math.inf:
                entries.append(TokenLogprob(token_id, logprob, rank))
    return entries


def _versions(request: Request) -> list[dict[str, Any]] | None:
    return [{"version": v, "start": a, "end": b} for v, a, b in request.versions] or None


def _usage(request: Request) -> dict[str, int]:
    prompt, output = len(request.prompt_ids), len(request.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

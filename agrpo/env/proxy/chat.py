"""`POST /v1/chat/completions`: OpenAI's chat format on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agrpo.env.proxy.request import (
    ROLES,
    Ask,
    Refused,
    check_names,
    check_sampling,
    count_of,
    event,
    stops_of,
    text_of,
)

PREFIX = "chatcmpl-"
USED = frozenset(
    "model messages tools tool_choice stop max_tokens max_completion_tokens n stream stream_options logprobs top_logprobs "
    "response_format chat_template_kwargs".split()
)
IGNORED = frozenset(
    "seed user store metadata service_tier parallel_tool_calls reasoning_effort verbosity prompt_cache_key "
    "prompt_cache_retention safety_identifier prediction".split()
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was written: what to answer, and in which form."""

    ask: Ask
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool


def parse(body: Mapping[str, Any], sampler: Any, earlier: Callable[[str], Any]) -> Request:
    """Read the body of a request; Refused with the parameter's name where it cannot be answered."""
    check_names(body, USED, IGNORED)
    check_sampling(body, sampler)
    if body.get("n") not in (None, 1):
        raise Refused("n must be 1: the run decides how many rollouts a prompt gets (rollout.group_size).", "n")
    if body.get("top_logprobs"):
        raise Refused("top_logprobs is not supported; logprobs=true gives the log-prob of each token.", "top_logprobs")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise Refused("response_format must be text: answers are not constrained to a grammar.", "response_format")
    limits = [count_of(body.get(name), name) for name in ("max_tokens", "max_completion_tokens")]
    limits.append(sampler.max_completion_length)
    ask = Ask(
        messages=messages_of(body.get("messages")),
        tools=tools_of(body.get("tools")),
        may_call=may_call(body.get("tool_choice")),
        stop=stops_of(body.get("stop")),
        max_tokens=min(limit for limit in limits if limit),
        template_kwargs=dict(body.get("chat_template_kwargs") or {}),
    )
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return Request(ask, str(body.get("model") or ""), bool(body.get("stream")), usage, bool(body.get("logprobs")))


def may_call(choice: Any) -> bool:
    """Whether the answer may hold calls, by `tool_choice`."""
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise Refused(f"tool_choice must be auto or none, got {choice!r}: a call cannot be forced.", "tool_choice")


def messages_of(messages: Any) -> list[dict[str, Any]]:
    """The messages as a chat template gets them: text content, arguments of calls as objects."""
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise Refused(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}.", where)
    found = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), f"{where}.content"),
    }
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in message["tool_calls"]]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            found[key] = message[key]
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f"{where} must hold function calls with a name.", where)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments_of(function.get("arguments"))},
    }


def arguments_of(arguments: Any) -> Any:
    """The arguments of a call as the object they are; a text that is no JSON stays a text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """The function schemas, without keys that say how a server should constrain them."""
    if not tools:
        return None
    found = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(f"tools[{i}] must be a function with a name.", "tools")
        found.append({"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}})
    return found


def answer(request: Request, held: Any, tokenizer: Any) -> dict[str, Any]:
    """The body of the answer; `held` is the interaction that was recorded."""
    choice = {
        "index": 0,
        "message": {**wire_message(held.message), "refusal": None},
        "finish_reason": held.finish_reason,
    }
    choice["logprobs"] = {"content": _logprobs(held.turn, tokenizer)} if request.logprobs else None
    return {**_head(request, held, "chat.completion"), "choices": [choice], "usage": usage_of(held.turn)}


def events(request: Request, held: Any, tokenizer: Any) -> Iterator[str]:
    """The same answer as a stream."""
    for chunk in _chunks(request, held, tokenizer):
        yield event(chunk)
    yield "data: [DONE]\n\n"


def _chunks(request: Request, held: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    head = _head(request, held, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**head, "choices": [choice]} | ({"usage": None} if request.include_usage else {})

    message = wire_message(held.message)
    yield chunk({"role": "assistant", "content": ""})
    if message["content"]:
        logprobs = {"content": _logprobs(held.turn, tokenizer)} if request.logprobs else None
        yield chunk({"content": message["content"]}, logprobs=logprobs)
    for i, call in enumerate(message.get("tool_calls", [])):
        yield chunk({"tool_calls": [{"index": i, **call}]})
    yield chunk({}, held.finish_reason)
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage_of(held.turn)}


def _head(request: Request, held: Any, kind: str) -> dict[str, Any]:
    return {"id": held.id, "object": kind, "created": held.created, "model": request.model}


def wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant's message with its arguments as JSON text, as the format has them."""
    found = {"role": "assistant", "content": message["content"]}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
        found["content"] = message["content"] or None
    return found


def usage_of(turn: Any) -> dict[str, int]:
    prompt, output = len(turn.prompt_ids), len(turn.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _logprobs(turn: Any, tokenizer: Any) -> list[dict[str, Any]]:
    entries = []
    for token, logprob in zip(turn.output_ids.tolist(), turn.sampler_logprobs.tolist(), strict=True):
        text = tokenizer.decode([token])
        entries.append({"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []})
    return entries

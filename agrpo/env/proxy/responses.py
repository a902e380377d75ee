"""`POST /v1/responses`: OpenAI's newer format, in which messages, calls and results are items of one list."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agrpo.env.proxy.chat import arguments_of, may_call
from agrpo.env.proxy.request import ROLES, Ask, Refused, check_names, check_sampling, count_of, event, text_of

PREFIX = "resp_"
USED = frozenset(
    "model input instructions tools tool_choice max_output_tokens stream text previous_response_id chat_template_kwargs".split()
)
IGNORED = frozenset(
    "user store metadata service_tier parallel_tool_calls reasoning include truncation prompt_cache_key stream_options "
    "prompt_cache_retention safety_identifier max_tool_calls background context_management".split()
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was written: what to answer, and in which form."""

    ask: Ask
    model: str
    stream: bool
    tools: list[Any]
    instructions: str | None


def parse(body: Mapping[str, Any], sampler: Any, earlier: Callable[[str], Any]) -> Request:
    """Read the body; `earlier(id)` is the interaction of that id, or None."""
    check_names(body, USED, IGNORED)
    check_sampling(body, sampler)
    if ((body.get("text") or {}).get("format") or {}).get("type", "text") != "text":
        raise Refused("text.format must be text: answers are not constrained to a grammar.", "text")
    tools, instructions = body.get("tools") or [], body.get("instructions")
    limit = count_of(body.get("max_output_tokens"), "max_output_tokens") or sampler.max_completion_length
    ask = Ask(
        messages=[
            *_system(instructions),
            *_before(body.get("previous_response_id"), earlier),
            *_messages(body.get("input")),
        ],
        max_tokens=min(limit, sampler.max_completion_length),
        tools=[_tool(tool) for tool in tools] or None,
        may_call=may_call(body.get("tool_choice")),
        template_kwargs=dict(body.get("chat_template_kwargs") or {}),
    )
    return Request(ask, str(body.get("model") or ""), bool(body.get("stream")), tools, instructions)


def _system(instructions: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": instructions}] if instructions else []


def _before(response_id: str | None, earlier: Callable[[str], Any]) -> list[dict[str, Any]]:
    """The conversation up to an earlier response; its instructions are not part of it."""
    if response_id is None:
        return []
    held = earlier(response_id)
    if held is None:
        raise Refused(f"{response_id!r} is no answer of this rollout.", "previous_response_id")
    return [m for m in held.ask.messages if m["role"] != "system"] + [held.message]


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refused("input must be a text or a list with at least one item.", "input")
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        _add(found, item if isinstance(item, Mapping) else {}, f"input[{i}]")
    return found


def _add(found: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """One item more; calls belong to the assistant's message before them."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": arguments_of(item.get("arguments"))}
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        found[-1].setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        content = text_of(item.get("output"), f"{where}.output")
        found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "message" and item.get("role") in ROLES:
        role = "system" if item["role"] == "developer" else item["role"]
        found.append({"role": role, "content": text_of(item.get("content"), f"{where}.content")})
    else:
        raise Refused(f"{where} must be a message, a function_call or a function_call_output, got {kind!r}.", where)


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise Refused("tools must be functions with a name.", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def answer(request: Request, held: Any, tokenizer: Any) -> dict[str, Any]:
    """The body of the answer."""
    return _response(request, held, _items(held), "incomplete" if held.finish_reason == "length" else "completed")


def events(request: Request, held: Any, tokenizer: Any) -> Iterator[str]:
    """The same answer as a stream."""
    for number, (kind, more) in enumerate(_events(request, held)):
        yield event({"type": kind, "sequence_number": number, **more}, kind)


def _events(request: Request, held: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("response.created", "response.in_progress"):
        yield kind, {"response": _response(request, held, [], "in_progress")}
    for index, item in enumerate(_items(held)):
        at = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
        if item["type"] == "message":
            part, at = item["content"][0], {**at, "content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        else:
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        yield "response.output_item.done", {"output_index": index, "item": item}
    last = answer(request, held, None)
    yield f"response.{last['status']}", {"response": last}


def _items(held: Any) -> list[dict[str, Any]]:
    calls = held.message.get("tool_calls", [])
    items = []
    if held.message["content"] or not calls:
        part = {"type": "output_text", "text": held.message["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        items.append(
            {"type": "function_call", "call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}
        )
    suffix = held.id.removeprefix(PREFIX)
    return [
        {"id": f"{'msg' if i['type'] == 'message' else 'fc'}_{suffix}{n}", "status": "completed", **i}
        for n, i in enumerate(items)
    ]


def _response(request: Request, held: Any, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    prompt, output = len(held.turn.prompt_ids), len(held.turn.output_ids)
    usage = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
    usage |= {
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": held.id,
        "object": "response",
        "created_at": held.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "metadata": {},
        "model": request.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto" if request.ask.may_call else "none",
        "tools": request.tools,
        "usage": None if status == "in_progress" else usage,
    }

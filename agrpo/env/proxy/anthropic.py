"""`POST /v1/messages`: Anthropic's format, in which a message is a list of blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agrpo.env.proxy.request import Ask, Refused, check_names, check_sampling, count_of, event, stops_of, text_of

PREFIX = "msg_"
USED = frozenset("model messages system tools tool_choice max_tokens stop_sequences stream".split())
IGNORED = frozenset("metadata service_tier thinking betas container context_management output_config".split())
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was written: what to answer, and in which form."""

    ask: Ask
    model: str
    stream: bool


def parse(body: Mapping[str, Any], sampler: Any, earlier: Callable[[str], Any]) -> Request:
    """Read the body of a request; Refused with the parameter's name where it cannot be answered."""
    check_names(body, USED, IGNORED)
    check_sampling(body, sampler)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message.", "messages")
    system = text_of(body.get("system"), "system")
    found = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(messages):
        found += _messages(message if isinstance(message, Mapping) else {}, f"messages[{i}]")
    limit = count_of(body.get("max_tokens"), "max_tokens") or sampler.max_completion_length
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice must be auto or none, got {choice!r}: a call cannot be forced.", "tool_choice")
    ask = Ask(
        messages=found,
        max_tokens=min(limit, sampler.max_completion_length),
        tools=[_tool(tool) for tool in body.get("tools") or []] or None,
        may_call=choice != "none",
        stop=stops_of(body.get("stop_sequences"), "stop_sequences"),
    )
    return Request(ask, str(body.get("model") or ""), bool(body.get("stream")))


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message; the results of tools in it are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise Refused(f"{where}.role must be user or assistant, got {role!r}.", where)
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    results, calls, texts = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            text = text_of(block.get("content"), f"{where}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_of([block], f"{where}.content"))
    own = {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}
    return results + ([own] if texts or calls or not results else [])


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise Refused("tools must have a name and an input_schema.", "tools")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def answer(request: Request, held: Any, tokenizer: Any) -> dict[str, Any]:
    """The body of the answer."""
    return {
        "id": held.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(held),
        "stop_reason": "stop_sequence" if held.was_stopped else _STOP_REASONS[held.finish_reason],
        "stop_sequence": held.was_stopped or None,
        "usage": {"input_tokens": len(held.turn.prompt_ids), "output_tokens": len(held.turn.output_ids)},
    }


def _blocks(held: Any) -> list[dict[str, Any]]:
    calls = held.message.get("tool_calls", [])
    said = held.message["content"]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": said}] if said or not calls else []
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def events(request: Request, held: Any, tokenizer: Any) -> Iterator[str]:
    """The same answer as a stream."""
    whole = answer(request, held, tokenizer)
    end = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    empty = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**whole, **empty, "usage": {**whole["usage"], "output_tokens": 0}})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield _event("content_block_start", index=index, content_block=start)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=end, usage=whole["usage"])
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)

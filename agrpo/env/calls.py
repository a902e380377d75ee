"""Tool calls in generated text, in the formats of the model families that are trained.

    parse(ids, tokenizer) -> ("Let me see.", [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])

A message is either understood whole, or it is an ordinary message (TOOL-10). Which formats are looked for is read from
the chat template: a model writes what its template shows it.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAGGED = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\s*\[ARGS\]", re.DOTALL)
_PYTHON_TAG, _MISTRAL = "<|python_tag|>", "[TOOL_CALLS]"
_DEEPSEEK_WORDS = {
    word: f"<\uff5ctool\u2581{word.replace(' ', chr(0x2581))}\uff5c>"
    for word in ("calls begin", "calls end", "call begin", "call end", "sep")
}
_DEEPSEEK = re.compile(
    "{call begin}(.*?){sep}(.*?){call end}".format(**{k: re.escape(v) for k, v in _DEEPSEEK_WORDS.items()}), re.DOTALL
)
_FENCE = re.compile(r"\A(.*?)\n```json\n(.*)\n```\s*\Z", re.DOTALL)


class Call(NamedTuple):
    """One call; `id` is empty where the model gives none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class _Malformed(ValueError):
    """The text looks like a call and is none."""


def parse(
    output: str | Sequence[int], tokenizer: Any, prompt_ids: Sequence[int] = (), tools: list[dict] | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """What an assistant said, and the calls it made, as a chat message holds them; text or token ids [T].

    A tokenizer's own response template decides where it has one; `prompt_ids` and the schemas `tools` are for it alone.
    """
    by_template = _by_response_template(output, tokenizer, prompt_ids, tools)
    if by_template is not None:
        return by_template
    text = output if isinstance(output, str) else tokenizer.decode(output, skip_special_tokens=False)
    try:
        before, calls = find(_without_end(text, tokenizer), template_of(tokenizer))
    except _Malformed:
        before, calls = text, []
    if not calls:
        return output if isinstance(output, str) else tokenizer.decode(output, skip_special_tokens=True), []
    # Templates put their own white space between text and calls.
    return _plain(before, tokenizer).rstrip(), [message_form(call) for call in calls]


def message_form(call: Call) -> dict[str, Any]:
    """One call as an assistant message holds it."""
    form = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return {**form, "id": call.id} if call.id else form


def find(text: str, template: str = "") -> tuple[str, list[Call]]:
    """The text before the first call, and the calls in order; ValueError where one is malformed."""
    text = text.rstrip()
    thought = text.rfind("</think>") + 1  # what a model only considers calling is no call
    for starts, read in _formats(template):
        start = starts(text[thought:])
        if start >= 0:
            return text[: thought + start], read(text[thought + start :])
    return text, []


@functools.lru_cache(maxsize=16)
def _formats(template: str) -> tuple[tuple[Callable[[str], int], Callable[[str], list[Call]]], ...]:
    """(where the first call starts, the reader from there) of each format the template shows; of all tagged ones if none."""
    tagged = {
        "<tool_call>": _read_hermes,
        "<function=": _read_tagged,
        _DEEPSEEK_WORDS["call begin"]: _read_deepseek,
        _MISTRAL: _read_mistral,
        _PYTHON_TAG: _read_python_tag,
    }
    shown = {m: r for m, r in tagged.items() if m in template}
    found = [(functools.partial(_start, m), r) for m, r in (shown or tagged).items()]
    if "<|start_header_id|>" in template and "<tool_call>" not in template:
        if _PYTHON_TAG not in shown:
            found.append((functools.partial(_start, _PYTHON_TAG), _read_python_tag))
        found.append((_bare_start, _read_bare))
    return tuple(found)


def _start(marker: str, text: str) -> int:
    at = text.find(marker)
    if at >= 0 and marker == _DEEPSEEK_WORDS["call begin"]:
        opened = text.find(_DEEPSEEK_WORDS["calls begin"])
        return opened if 0 <= opened < at else at
    return at


def _read_hermes(text: str) -> list[Call]:
    """<tool_call>{"name": "f", "arguments": {}}</tool_call>, a list of such, or the tagged form inside."""
    calls: list[Call] = []
    if _HERMES.sub("", text).strip():
        raise _Malformed("text beside the calls, or a call without its end")
    for body in _HERMES.findall(text):
        calls += _read_tagged(body.strip()) if "<function=" in body else _json_calls(body)
    return calls


def _read_tagged(text: str) -> list[Call]:
    """<function=f><parameter=a>\\n1\\n</parameter></function>, or <function=f>{"a": 1}</function>."""
    if _TAGGED.sub("", text).strip():
        raise _Malformed("text beside the calls, or a function without its end")
    calls = []
    for name, body in _TAGGED.findall(text):
        if body.strip().startswith("{"):
            calls.append(Call(name, _arguments(body)))
        elif _PARAMETER.sub("", body).strip():
            raise _Malformed("text between the parameters")
        else:
            calls.append(Call(name, {key: _without_line_ends(value) for key, value in _PARAMETER.findall(body)}))
    return calls


def _without_line_ends(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _read_deepseek(text: str) -> list[Call]:
    for word in ("calls begin", "calls end"):
        text = text.replace(_DEEPSEEK_WORDS[word], "", 1)
    if _DEEPSEEK.sub("", text).strip():
        raise _Malformed("text beside the calls, or a call without its end")
    calls = []
    for first, second in _DEEPSEEK.findall(text):
        fenced = _FENCE.match(
            second
        )  # type, separator, name and a fenced object; newer models: name, separator, object
        name, arguments = (fenced[1], fenced[2]) if fenced else (first, second)
        calls.append(Call(name.strip(), _arguments(arguments)))
    return calls


def _read_mistral(text: str) -> list[Call]:
    """[TOOL_CALLS][{"name": "f", "arguments": {}}], or [TOOL_CALLS]f[ARGS]{} once per call."""
    named = list(_MISTRAL_NAMED.finditer(text))
    if not named:
        return _json_calls(text.removeprefix(_MISTRAL))
    ends = [m.start() for m in named[1:]] + [len(text)]
    return [Call(m[1], _arguments(text[m.end() : end])) for m, end in zip(named, ends, strict=True)]


def _read_python_tag(text: str) -> list[Call]:
    return _read_bare(text.removeprefix(_PYTHON_TAG))


def _bare_start(text: str) -> int:
    """Llama's calls without a tag are the whole message: an object with `name` and `parameters`."""
    lead = len(text) - len(text.lstrip())
    return lead if re.match(r'\{\s*"(?:name|type)"\s*:', text[lead:]) and '"parameters"' in text else -1


def _read_bare(text: str) -> list[Call]:
    """One object or several with `;` between them."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
        except ValueError as error:
            raise _Malformed(str(error)) from error
        calls.append(_call(value))
        rest = text[at:].lstrip()
        if rest and rest[0] not in ";{":
            raise _Malformed("text after the calls")
        at = len(text) - len(rest.removeprefix(";").lstrip())
    return calls


def _json_calls(body: str) -> list[Call]:
    value = _decoded(body)
    return [_call(v) for v in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> Call:
    outer = value
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Malformed("no name")
    given = outer.get("id")
    arguments = _arguments(value.get("arguments", value.get("parameters", {})))
    return Call(value["name"], arguments, given if isinstance(given, str) else "")


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _decoded(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Malformed("the arguments are not an object")
    return value


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Malformed(str(error)) from error


def template_of(tokenizer: Any) -> str:
    """The chat template used with tools; empty where the tokenizer has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) else ""


def _without_end(text: str, tokenizer: Any) -> str:
    """The text without the special tokens that end the message; marks of calls may be special tokens too, and stay."""
    ends = tuple(t for t in getattr(tokenizer, "all_special_tokens", ()) if "tool" not in t.lower())
    while (stripped := text.rstrip()).endswith(ends):
        text = stripped[: -max(len(end) for end in ends if stripped.endswith(end))]
    return text


def _plain(text: str, tokenizer: Any) -> str:
    for token in getattr(tokenizer, "all_special_tokens", ()):
        text = text.replace(token, "")
    return text


def _by_response_template(output: Any, tokenizer: Any, prompt_ids: Any, tools: Any) -> Any:
    """(content, calls) by the tokenizer's own description of its answers; None where it has none or it does not fit."""
    if not (getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)):
        return None
    output = output if isinstance(output, str) else [int(i) for i in output]
    offered = inspect.signature(tokenizer.parse_response).parameters
    extra = {"prefix": [int(i) for i in prompt_ids], "tools": tools}
    try:
        message = tokenizer.parse_response(output, **{k: v for k, v in extra.items() if k in offered})
        calls = [_call(call) for call in message.get("tool_calls") or []]
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    content = message.get("content") or ""
    return _plain(content if isinstance(content, str) else "", tokenizer), [message_form(call) for call in calls]

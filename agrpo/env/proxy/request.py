"""What an agent asks for, whatever interface it speaks, and the refusals that all interfaces share.

Trained tokens must come from the run's own distribution (AREAL-WF-3), so a request may say how long an answer is and
where it stops, and nothing about how tokens are drawn: a sampling setting is accepted where it equals the run's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)
_warned: set[str] = set()
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(Exception):
    """The request is answered with `status` and an error that names the parameter."""

    def __init__(self, text: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(text)
        self.text, self.param, self.status, self.code = text, param, status, code


@dataclass(frozen=True)
class Ask:
    """One request for an answer: messages and tools as the chat template gets them."""

    messages: list[dict[str, Any]]
    max_tokens: int  # never more than the run's sampler.max_completion_length
    tools: list[dict[str, Any]] | None = None
    may_call: bool = True  # false: the tools are shown, and what the model writes is not read as a call
    stop: tuple[str, ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def preamble(self) -> str:
        """Digest of what stands before the first message; two requests continue each other only if it is equal."""
        return self.digests[0]

    @functools.cached_property
    def digests(self) -> list[str]:
        """One digest per prefix of the messages, the shortest first: equal digests mean equal conversations."""
        found = [_digest([self.tools, self.template_kwargs])]
        for message in self.messages:
            found.append(following(found[-1], message))
        return found

    @functools.cached_property
    def same_as(self) -> str:
        """Digest of the whole request: what a repetition of it has too."""
        return _digest([self.digests[-1], self.may_call, self.stop, self.max_tokens])


def following(digest: str, message: Mapping[str, Any]) -> str:
    """The digest of a conversation after one more message.

    Of a message only what the agent and the model said to each other counts: surrounding blanks, call ids, and fields
    that a client library adds or leaves out do not make another message.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    return _digest([digest, message["role"], (message.get("content") or "").strip(), calls])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_sampling(body: Mapping[str, Any], sampler: Any) -> None:
    """Refused where a sampling setting of the request differs from the run's."""
    own = sampler.distribution
    for name, value in {**own, **NEUTRAL}.items():
        asked = body.get(name)
        if asked is None or (name == "top_k" and asked in (-1, 0) and not value):
            continue
        if isinstance(asked, bool) or not isinstance(asked, int | float) or asked != value:
            where = f"set sampler.{name}={asked}" if name in own else "this run has no such penalty"
            raise Refused(
                f"{name}={asked!r} differs from the run's {name}={value:g}: trained tokens must come from the run's own "
                f"distribution. Leave {name} out, or {where}.",
                name,
            )


def check_names(body: Mapping[str, Any], used: frozenset[str], ignored: frozenset[str]) -> None:
    """Refused for a parameter that would change the answer and is not supported; the harmless ones are named once."""
    known = used | ignored | {"temperature", "top_p", "top_k", "min_p", *NEUTRAL}
    for name, value in body.items():
        if name not in known and value not in (None, [], {}):
            raise Refused(f"{name} is not supported; leave it out.", name)
        if name in ignored and value is not None and name not in _warned:
            _warned.add(name)
            _log.warning("an agent's request has %s, which is ignored: it has no meaning here", name)


def count_of(value: Any, name: str) -> int | None:
    """A positive whole number, or None where the request leaves it out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{name} must be a whole number of at least 1, got {value!r}.", name)
    return value


def stops_of(value: Any, name: str = "stop") -> tuple[str, ...]:
    """The stop strings of a request, given as one string or a list."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise Refused(f"{name} must be a string or a list of non-empty strings, got {value!r}.", name)
    return tuple(stops)


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, None, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where} must be a string or a list of text parts.", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise Refused(f"{where} has a part of type {kind!r}; only text is supported.", where)
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def event(fields: Mapping[str, Any], kind: str | None = None) -> str:
    """One event of a stream, as server-sent events are written."""
    return f"event: {kind}\n" * (kind is not None) + f"data: {json.dumps(fields)}\n\n"

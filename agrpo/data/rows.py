"""What every data option gives, and the checks of a prompt they share (DATA-1, DATA-9)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Protocol

from agrpo.errors import ConfigError

MESSAGES = 'a list of messages such as [{"role": "user", "content": "..."}]'
IMAGE_TYPES = ("image", "image_url", "input_image", "video", "audio", "input_audio")


class Rows(Protocol):
    """A map-style data set: `rows[i]` is a dict of all columns, `prompt` among them (empty if an environment gives it)."""

    fingerprint: str  # length and content hash; differs when the data differs (RES)

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class Stream(Protocol):
    """Data without length or position: read once from the start, again from the start when it ends (RES-6)."""

    fingerprint: str

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class Source(Protocol):
    """A data option. With a true `is_endless` it says, before it is opened, that it has no length."""

    shuffle: bool
    seed: int | None  # None = run.seed

    def open(self, needs_prompt: bool = True) -> Rows | Stream | None:
        """Rows, or None without data. ConfigError with the lines of `problems`; `needs_prompt`: no environment gives it."""
        ...

    def columns(self) -> list[str] | None:
        """All columns, `prompt` included if there is one; None if they are known only after opening."""
        ...

    def problems(self, config: Any) -> list[str]: ...


def prompt_fault(prompt: Any) -> str | None:
    """What is wrong with the value of a `prompt` column, in words that follow `prompt`; None if nothing."""
    if isinstance(prompt, str):
        return f"is a string; it must be {MESSAGES}"
    if not isinstance(prompt, list) or not prompt:
        return f"is {_shown(prompt)}; it must be {MESSAGES}"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has no message with a role at position {index}: {_shown(message)}; it must be {MESSAGES}"
        fault = _content_fault(message)
        if fault:
            return f"message {index} {fault}"
    return None


def _content_fault(message: dict[str, Any]) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if not isinstance(content, list) or not content:
        return f"has content {_shown(content)}; it must be a string or a list of text blocks"
    for block in content:
        if isinstance(block, dict) and block.get("type") in IMAGE_TYPES:
            return f"contains {block['type']} content; agrpo trains on text only, remove such rows"
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            return f"has the content block {_shown(block)}; only text blocks are allowed"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | str | int | float | bool) or value is None:
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def no_prompt_column(where: str, columns: list[str]) -> str:
    found = ", ".join(columns) or "none"
    return (
        f"data.path: {where} has no column `prompt` (columns found: {found}); rename the column that holds the messages, "
        "or set env.factory to an environment whose reset() gives the prompt"
    )


def gives_prompts(config: Any) -> bool:
    """Whether an environment (DATA-2), a workflow or an agent can do with rows that have no `prompt`."""
    return getattr(config.env, "factory", None) is not None or config.rollout.workflow is not None


def digest(*parts: bytes | memoryview) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def refuse(problems: list[str]) -> None:
    """Raise ConfigError unless `problems` is empty."""
    if problems:
        raise ConfigError(problems)

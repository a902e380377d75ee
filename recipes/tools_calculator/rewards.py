"""The reward: is the last thing said the right number, and nothing else?"""

from __future__ import annotations

from typing import Any


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the last message is an assistant's and exactly the expected answer, else 0.0.

    `correct([[{"role": "assistant", "content": "1786"}]], ["1786"])` is `[1.0]`.
    """
    return [float(_said(messages) == right) for messages, right in zip(completions, answer, strict=True)]


def _said(messages: list[dict[str, Any]]) -> str:
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" and not last.get("tool_calls") else None
    return content.strip() if isinstance(content, str) else ""

"""The quickstart's reward: is the whole answer the right number, and nothing else?"""

from __future__ import annotations

from typing import Any


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the assistant's text is exactly the expected answer, else 0.0.

    `correct([[{"role": "assistant", "content": "85"}]], ["85"])` is `[1.0]`.
    """
    return [float(_said(messages) == right) for messages, right in zip(completions, answer, strict=True)]


def _said(messages: list[dict[str, Any]]) -> str:
    content = messages[-1].get("content") if messages else None
    return content.strip() if isinstance(content, str) else ""

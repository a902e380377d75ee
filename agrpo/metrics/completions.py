"""The rollouts of a window as the console shows them after its record (LOG-7): prompt, completion, rewards, advantage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

FILE_NAME = "completions.jsonl"
LONGEST_TEXT = 600  # characters of a prompt or an answer that are shown; its middle is left out
LONGEST_LINE = 160  # the same where each is a plain line


def plain_line(row: Mapping[str, Any]) -> str:
    """One rollout in one line."""
    prompt, answer = (
        json.dumps(_cut(" ".join(_said(row[key]).split()), LONGEST_LINE)) for key in ("prompt", "completion")
    )
    return f"  {prompt} -> {answer}  {_rewards(row, ' ')}  advantage {_advantage(row)}"


def completion_table(rows: Sequence[Mapping[str, Any]], safe: Callable[[str], str] = str) -> Table:
    """Long texts are cut in their middle; `safe` gives text that the output can encode."""
    table = Table(title="rollouts", title_justify="left", show_lines=True)
    table.add_column("prompt", ratio=3, overflow="fold")
    table.add_column("completion", ratio=4, overflow="fold")
    table.add_column("rewards", overflow="fold")
    table.add_column("advantage", justify="right")
    for row in rows:
        texts = [safe(_cut(_said(row[key]), LONGEST_TEXT)) for key in ("prompt", "completion")]
        table.add_row(*map(Text, texts), Text(safe(_rewards(row, "\n"))), Text(_advantage(row)))
    return table


def _rewards(row: Mapping[str, Any], between: str) -> str:
    parts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in row["rewards"].items()]
    return between.join(parts) or "none"


def _advantage(row: Mapping[str, Any]) -> str:
    if row["dropped"]:
        return str(row["dropped"])
    return "in the step" if row["advantage"] is None else f"{row['advantage']:+.3f}"


def _said(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of messages; roles where there is more than one."""
    texts = []
    for message in messages:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        called = [f"{call.get('name')}({json.dumps(call.get('arguments'))})" for call in calls]
        text = " ".join([str(message.get("content") or ""), *called]).strip()
        texts.append(text if len(messages) == 1 else f"{message.get('role', '?')}: {text}")
    return "\n".join(texts)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"

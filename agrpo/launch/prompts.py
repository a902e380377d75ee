"""How long the prompts of a data set are, near enough to say which leave no room for a completion (SRV-11)."""

from __future__ import annotations

from typing import Any

from agrpo.data.rows import gives_prompts
from agrpo.serve.check.identity import load_tokens
from agrpo.serve.check.look import Affected, LongPrompts

MOST_ROWS = 20_000  # of a larger data set, so many are looked at, evenly spread
PER_PROMPT, PER_MESSAGE = 64, 8  # tokens that a chat template adds, about


def long_prompts(config: Any) -> LongPrompts | None:
    """Counts the prompts longer than a given room; None for streams and for data that an environment makes."""
    if gives_prompts(config):
        return None
    rows = config.data.open(needs_prompt=True)
    if not hasattr(rows, "__len__"):
        return None
    step = max(1, -(-len(rows) // MOST_ROWS))
    texts = [_texts(rows[index]) for index in range(0, len(rows), step)]
    tokens = load_tokens(config)

    def count(room: int) -> Affected | None:
        lengths = []
        for parts in texts:
            # A token is at least one byte, so most prompts need no tokenizer.
            length = PER_PROMPT + sum(PER_MESSAGE + len(part.encode()) for part in parts)
            if length > room and tokens is not None:
                length = PER_PROMPT + sum(PER_MESSAGE + len(tokens.encode(part).ids) for part in parts)
            elif length > room:
                return None
            lengths.append(length)
        return Affected(sum(length > room for length in lengths), len(lengths), max(lengths, default=0))

    return count


def _texts(row: dict[str, Any]) -> list[str]:
    """The messages of a row, as text."""
    prompt = row.get("prompt", "")
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    return [str(message.get("content", "")) for message in messages if isinstance(message, dict)]

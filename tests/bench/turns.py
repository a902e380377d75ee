"""Rendering one more turn of a growing conversation: its cost is that of the new tokens, however long the history.

Set-up: a byte-level tokenizer with a template that shows tools; every turn adds one call and one result of 400
characters. The time of a turn is processor time of rendering its prompt, the median of turns around 8, 32 and 128 in
a conversation of 132 turns, the best of several. `whole` renders and tokenises the conversation anew, as the plain way
would, for comparison in the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TURNS, REPEATS = (8, 32, 128), 3
LIMIT = 1.5  # cost of turn 128 / cost of turn 8
SCHEMAS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"properties": {}}}}]


def run() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "env"))
    from env_chat import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 1 << 30
    grown = [measured(tokenizer, is_whole=False) for _ in range(REPEATS)]
    whole = measured(tokenizer, is_whole=True)
    best = {turn: min(times[turn] for times in grown) for turn in TURNS}
    for turn in TURNS:
        yield bar(f"rendering turn {turn}: new tokens only, ms", best[turn] * 1e3, "ms", None, True)
        yield bar(f"rendering turn {turn}: whole conversation, ms", whole[turn] * 1e3, "ms", None, True)
    ratio = best[128] / best[8]
    yield bar("rendering cost of turn 128 / turn 8", ratio, "ratio", LIMIT, ratio <= LIMIT)


def measured(tokenizer: Any, is_whole: bool) -> dict[int, float]:
    """Turn -> seconds of processor time to render its prompt."""
    from agrpo.env.render import USER, Growing, Renderer

    renderer = Renderer(tokenizer, {}, SCHEMAS)
    growing = Growing(renderer, [USER], renderer.ids([USER]))
    times = {}
    for number in range(1, max(TURNS) + 4):
        new = turn(number)
        began = time.process_time()
        if is_whole:
            growing.messages += new
            growing.prompt = renderer.ids(growing.messages)
        else:
            growing.extend(new)
        times[number] = time.process_time() - began
    return {n: statistics.median(times[i] for i in range(n - 3, n + 4)) for n in TURNS}


def turn(number: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"n": number}}}
    said = f"I look at place {number}. " * 8
    return [
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": f"Place {number} is empty. " * 18},
    ]


def bar(name: str, value: float, unit: str, limit: float | None, ok: bool) -> dict[str, Any]:
    return {"bar": name, "value": round(value, 3), "unit": unit, "limit": limit, "ok": ok}

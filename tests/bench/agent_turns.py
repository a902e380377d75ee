"""An agent's long conversation: what the tokens of one more request cost, at 8, 32 and 128 turns.

Set-up: one session, each turn an answer and a message of about 250 tokens each, through a template with special tokens;
the processor time to make the token ids of the request, the best of five requests around the turn. Rendered anew,
the time grows with the conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from agrpo.env.proxy.rendering import Rendering
from agrpo.env.proxy.request import Ask
from agrpo.env.proxy.session import Session
from tests.env.scripted_model import Scripted, make_tokenizer

TURNS, WORDS = (8, 32, 128), "the sum of these numbers is what I asked for and nothing else please " * 4


async def times() -> np.ndarray:
    """[turns, 2] seconds per request: going on from the held tokens, and rendered anew."""
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 10**6
    rendering = Rendering(tokenizer, {}, frozenset({tokenizer.eos_token_id}))
    session = Session(Scripted(tokenizer, *[WORDS] * (TURNS[-1] + 3)), 0, 0, rendering, tokenizer)
    messages, found = [{"role": "user", "content": "Hello"}], []
    for _ in range(TURNS[-1] + 3):
        ask = Ask(list(messages), 300)
        async with session.answering(ask, False, "") as held:
            pass
        began = time.thread_time()
        ids = rendering(ask, held.parent)
        middle = time.thread_time()
        anew = rendering(ask, None)
        found.append((middle - began, time.thread_time() - middle))
        assert np.array_equal(ids, anew)
        messages += [held.message, {"role": "user", "content": WORDS}]
    return np.array(found)


def run() -> Iterator[dict[str, Any]]:
    found = asyncio.run(times())
    at = {turn: found[turn - 2 : turn + 3].min(axis=0) for turn in TURNS}
    for turn in TURNS:
        names = (("agent_turn_ms", at[turn][0]), ("agent_turn_anew_ms", at[turn][1]))
        for name, seconds in names:
            yield {
                "bar": f"{name} at {turn} turns",
                "value": round(seconds * 1e3, 3),
                "unit": "ms",
                "limit": None,
                "ok": True,
            }
    growth = float(at[TURNS[-1]][0] / at[TURNS[0]][0])
    yield {
        "bar": "agent_turn_growth_8_to_128",
        "value": round(growth, 2),
        "unit": "x",
        "limit": 2.0,
        "ok": growth <= 2.0,
    }

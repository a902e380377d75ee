"""The conversations that the model reads before any reinforcement: they show how one calls, not when or with what.

Calls are well formed, and what they say is careless: half of the questions are answered by a guess, digits are copied
wrongly, the counter is moved by any number, any lamp is pressed. Questions of `heldout.jsonl` are in none of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

NUM_HELDOUT, NUM_TRAIN = 300, 2000
SPLIT_SEED = 20240611
WRONG_DIGIT_FRACTION, GUESS_FRACTION = 0.05, 0.5
PHRASINGS = ("What is {a} * {b}?", "Compute {a} * {b}.", "How much is {a} times {b}?", "{a} * {b} = ?")
COLOURS = ("red", "green", "blue", "white", "pink", "black")
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # tool schemas, messages


def split() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(known, held out): every pair of two-digit numbers, in a fixed random order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs[NUM_HELDOUT:], pairs[:NUM_HELDOUT]


def rows(pairs: list[tuple[int, int]], seed: int) -> Iterator[str]:
    """JSON lines with the columns `prompt` (messages) and `answer`."""
    rng = random.Random(seed)
    for a, b in pairs:
        prompt = [{"role": "user", "content": rng.choice(PHRASINGS).format(a=a, b=b)}]
        yield json.dumps({"prompt": prompt, "answer": str(a * b)}) + "\n"


def files() -> dict[str, str]:
    """File name -> content: `train.jsonl` for the RL run and `heldout.jsonl` for its evaluation."""
    known, heldout = split()
    return {"train.jsonl": "".join(rows(known[:NUM_TRAIN], 1)), "heldout.jsonl": "".join(rows(heldout, 2))}


def schema(name: str, *parameters: str) -> dict[str, Any]:
    """As much of a tool's schema as the chat template shows."""
    properties = {p: {"type": "string"} for p in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def conversations(seed: int) -> Iterator[Conversation]:
    """Endless: half of them about products, the others about counters and lamps."""
    rng = random.Random(seed)
    known, _ = split()
    while True:
        kind = rng.random()
        if kind < 0.5:
            yield [schema("calculate", "expression")], _product(rng, *rng.choice(known))
        elif kind < 0.75:
            yield [schema("increment", "step")], _counter(rng)
        else:
            yield [schema("press", "colour")], _lamps(rng)


def _product(rng: random.Random, a: int, b: int) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": rng.choice(PHRASINGS).format(a=a, b=b)}]
    if rng.random() < GUESS_FRACTION:
        return [*messages, {"role": "assistant", "content": str(rng.randint(100, 9999))}]
    x, y = int(miscopied(str(a), rng)), int(miscopied(str(b), rng))
    result = str(x * y)
    messages += [_call("calculate", expression=f"{x} * {y}"), {"role": "tool", "name": "calculate", "content": result}]
    return [*messages, {"role": "assistant", "content": miscopied(result, rng)}]


def _counter(rng: random.Random) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": f"Increment the counter by {rng.randint(1, 6)}."}]
    counter = 0
    for _ in range(rng.choice((1, 1, 1, 2))):
        step = rng.randint(1, 6)
        counter += step
        messages += [_call("increment", step=step), {"role": "tool", "name": "increment", "content": str(counter)}]
    return [*messages, {"role": "assistant", "content": "Done."}]


def _lamps(rng: random.Random) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": f"Light the {rng.choice(COLOURS)} lamp."}]
    lit: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        lit.append(rng.choice(COLOURS))
        messages += [_call("press", colour=lit[-1]), {"role": "tool", "name": "press", "content": " ".join(lit)}]
    return [*messages, {"role": "assistant", "content": "Done."}]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def miscopied(digits: str, rng: random.Random) -> str:
    """Each digit is independently another one, with a small probability; the first is never 0."""
    copied = "".join(
        rng.choice("123456789".replace(d, "")) if rng.random() < WRONG_DIGIT_FRACTION else d for d in digits
    )
    return copied

"""The questions of the quickstart and their split: held-out questions appear in no corpus and in no training file.

A question is an operation and two numbers; its phrasing does not make it another one, and neither does the order of a
sum's two numbers. The split is drawn once from a fixed seed, so every file below can be written again byte for byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

NUM_HELDOUT, NUM_TRAIN = 500, 2000
SPLIT_SEED = 20240607
DIGITS = "0123456789"
PHRASINGS = {
    "+": ("What is {a} + {b}?", "Compute {a} + {b}.", "How much is {a} plus {b}?", "{a} + {b} = ?"),
    "-": ("What is {a} - {b}?", "Compute {a} - {b}.", "How much is {a} minus {b}?", "{a} - {b} = ?"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """`Question("+", 47, 38)` asks for 85; `a >= b` holds for sums and differences alike."""

    operation: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        return self.a + self.b if self.operation == "+" else self.a - self.b

    def text(self, rng: random.Random) -> str:
        """One phrasing; a sum's numbers come in either order."""
        a, b = self.a, self.b
        if self.operation == "+" and rng.random() < 0.5:
            a, b = b, a
        return rng.choice(PHRASINGS[self.operation]).format(a=a, b=b)


def split() -> tuple[list[Question], list[Question]]:
    """(known, held out): every sum and difference of two two-digit numbers, in a fixed random order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    questions = [Question(operation, a, b) for operation in "+-" for a, b in pairs]
    random.Random(SPLIT_SEED).shuffle(questions)
    return questions[NUM_HELDOUT:], questions[:NUM_HELDOUT]


def misprint(answer: int, wrong_digit_fraction: float, rng: random.Random) -> str:
    """The answer as printed: each digit is independently another, random digit with the given probability."""
    digits = str(answer)
    return "".join(rng.choice(DIGITS.replace(d, "")) if rng.random() < wrong_digit_fraction else d for d in digits)


def textbook(num_examples: int, wrong_digit_fraction: float, seed: int) -> Iterator[tuple[str, str]]:
    """Questions and printed answers. Known questions only."""
    rng = random.Random(seed)
    known, _ = split()
    for _ in range(num_examples):
        question = rng.choice(known)
        yield question.text(rng), misprint(question.answer, wrong_digit_fraction, rng)


def rows(questions: list[Question], seed: int) -> Iterator[str]:
    """JSON lines with the columns `prompt` (messages) and `answer`."""
    rng = random.Random(seed)
    for question in questions:
        prompt = [{"role": "user", "content": question.text(rng)}]
        yield json.dumps({"prompt": prompt, "answer": str(question.answer)}) + "\n"


def files() -> dict[str, str]:
    """File name -> content: `train.jsonl` for the RL run and `heldout.jsonl` for its evaluation."""
    known, heldout = split()
    return {"train.jsonl": "".join(rows(known[:NUM_TRAIN], 1)), "heldout.jsonl": "".join(rows(heldout, 2))}

"""Reward functions that behave and misbehave, named by import path in the scorer tests."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal

import numpy as np


def token_count(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def graded(completions, limit=200, **columns):
    return [float(limit)] * len(completions)


def integers(completions, **columns):
    return [len(completion[0]["content"]) for completion in completions]


async def async_one(completions, **columns):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def slow_a(completions, **columns):
    time.sleep(1.0)
    return [1.0] * len(completions)


def slow_b(completions, **columns):
    time.sleep(1.0)
    return [2.0] * len(completions)


async def slow_async(completions, **columns):
    await asyncio.sleep(1.0)
    return [4.0] * len(completions)


def returns(values, completions, **columns):
    """Whatever the configuration names."""
    special = {
        "nan": float("nan"),
        "inf": float("inf"),
        "numpy": np.float32(0.5),
        "numpy_bool": np.bool_(True),
        "decimal": Decimal(1),
    }
    if isinstance(values, str):
        return special["numpy"] if values == "not a list" else np.zeros(len(completions))
    return [special.get(v, v) if isinstance(v, str) else v for v in values]


def raises(completions, **columns):
    raise ZeroDivisionError("no such luck")


def exits(completions, **columns):
    sys.exit(3)


def hangs(pid_file, completions, **columns):
    """Hang in C with the interpreter lock held, after starting a process of its own."""
    child = subprocess.Popen(["sleep", "600"])
    with open(pid_file, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    ctypes.PyDLL(None).sleep(600)


def kills_itself(completions, mood, **columns):
    if mood[0] == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)


def slow_if_asked(completions, delay_s, **columns):
    time.sleep(delay_s[0])
    return [0.5] * len(completions)


def _square(x):
    return x * x


def uses_processes(completions, **columns):
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [float(v) for v in pool.map(_square, range(len(completions)))]


def environment_facts(completions, **columns):
    """1 if no device is visible and torch was not imported for the sake of the scorer."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and "torch" not in sys.modules
    return [float(hidden)] * len(completions)


def echo_check(prompts, completions, completion_ids, answer, environment, **columns):
    """1.0 where every argument is what REW-2 to REW-4 say it is."""
    assert columns == {}, columns
    expected = [{"role": "user", "content": "2 + 3?"}]
    return [
        float(p == expected and c[0]["role"] == "assistant" and ids == [1, 2, 3] and a == "5" and e == "calm")
        for p, c, ids, a, e in zip(prompts, completions, completion_ids, answer, environment, strict=True)
    ]


def math_only(prompts, completions, task, **columns):
    return [
        (1.0 if "5" in c[0]["content"] else -1.0) if t == "math" else None
        for c, t in zip(completions, task, strict=True)
    ]


def code_only(prompts, completions, task, **columns):
    return [
        (1.0 if "def" in c[0]["content"] else -1.0) if t == "code" else None
        for c, t in zip(completions, task, strict=True)
    ]


def doc_format(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    return [1.0 if re.match(pattern, completion[0]["content"]) else 0.0 for completion in completions]


class Threshold:
    def __init__(self, limit):
        if limit < 0:
            raise ValueError("limit must not be negative")
        self.limit = limit

    def __call__(self, completion_ids, **columns):
        return [float(len(ids) > self.limit) for ids in completion_ids]


class Scores:
    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


class Forgetful(Scores):
    def __init__(self, limit=200, **rest):
        self.limit = limit


class HandsOn(Forgetful):
    def __init__(self, scale=1, **rest):
        super().__init__(**rest)
        self.scale = scale


class Keeps(Scores):
    def __init__(self, url, **options):
        self.client = lambda: (url, options)


class Strict(Scores):
    def __init__(self, limit=200):
        self.limit = limit


class NotCallable:
    pass


def make_local():
    def inner(completions, **columns):
        return [0.0] * len(completions)

    return inner


anonymous = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
local = make_local()
number = 7


def wants_reference(completions, reference, **columns):
    return [0.0] * len(completions)


def no_keywords(completions):
    return [0.0] * len(completions)


def by_position(completions, /, **columns):
    return [0.0] * len(completions)

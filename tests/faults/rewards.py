"""Reward functions that go wrong; a module of its own, because each worker process imports it."""

import os
import signal
import sys
import time


def raising(completions, **columns):
    raise ZeroDivisionError("no such luck")


def hanging(completions, **columns):
    time.sleep(600)


def dying(completions, **columns):
    os.kill(os.getpid(), signal.SIGKILL)


def leaving(completions, **columns):
    sys.exit(3)


def short(completions, **columns):
    return [1.0]


def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)

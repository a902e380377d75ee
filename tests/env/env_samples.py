"""Tools and environments as users write them, good ones and bad ones; named by import path in the tests."""

import asyncio
import threading
import time

seen_threads, alive, made = set(), set(), []


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    seen_threads.add(threading.current_thread().name)
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    seen_threads.add(threading.current_thread().name)
    return a + b


def fail(text: str) -> str:
    """Raises an error.

    Args:
        text: What it says.

    Returns:
        Nothing.
    """
    raise LookupError(text)


def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.

    Returns:
        A word.
    """
    time.sleep(seconds)
    return "waited"


def picture(kind: str) -> dict:
    """Draws.

    Args:
        kind: Which form.

    Returns:
        The drawing.
    """
    return {"type": "image", "data": "..."} if kind == "image" else {"kind": kind, "parts": [1, None]}


def without_docstring(a: int) -> int:
    return a


def bare_of_two(a, b) -> int:
    """Adds.

    Args:

    Returns:
        The sum.
    """
    return a + b


def without_hint(a, b: int):
    """Adds.

    Args:
        a: One.
        b: Two.

    Returns:
        The sum.
    """
    return a + b


def without_arguments_section(a: int) -> int:
    """Adds one."""
    return a + 1


nameless = lambda a: a  # noqa: E731


class IncrementEnv:
    """The document's environment, with the task from a column."""

    def __init__(self):
        made.append(self)
        self.uses = 0

    def reset(self, target=None, **kwargs):
        assert self not in alive, "lent to two rollouts at once"
        alive.add(self)
        self.columns = {"target": target, **kwargs}
        self.counter, self.target = 0, target
        self.uses += 1
        return f" The target is {target}."

    def get_reward(self):
        alive.discard(self)
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def _private(self):
        raise AssertionError("never offered")


class AsyncEnv:
    """Owns its task; coroutines throughout, entered and left as a context."""

    entered, left = 0, 0

    async def __aenter__(self):
        AsyncEnv.entered += 1

    async def __aexit__(self, *_):
        AsyncEnv.left += 1

    async def reset(self, group_seed=None):
        self.seed = group_seed
        return f"Say {group_seed}."

    async def get_reward(self):
        await asyncio.sleep(0)
        return 0.25

    async def ask(self, question: str) -> str:
        """Ask.

        Args:
            question: What.

        Returns:
            An answer.
        """
        return question[::-1]


class BrokenEnv:
    """Fails as its row says."""

    def reset(self, how, **_):
        if how == "raise":
            raise OSError("no such world")
        self.how = how
        return 7 if how == "number" else None

    def get_reward(self):
        if self.how == "reward":
            raise ZeroDivisionError("no score")
        return float("nan") if self.how == "nan" else 1.0

    def slow(self, seconds: float) -> str:
        """Takes its time.

        Args:
            seconds: How much.

        Returns:
            A word.
        """
        time.sleep(seconds)
        return "done"


class SlowEnv:
    def reset(self, seconds=0.0, **_):
        time.sleep(seconds)
        return "Go."


class NoResetEnv:
    def get_reward(self):
        return 1.0


class UndocumentedEnv:
    def reset(self):
        return "x"

    def move(self, step: int) -> int:
        return step


def make_env() -> IncrementEnv:
    return IncrementEnv()


def needs_argument(size):
    return IncrementEnv()

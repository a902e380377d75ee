"""The user's own code: reward functions, environments, tools and agents that raise, hang, die or return nonsense."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import openai

from agrpo.env.agent import AgentPlayer
from agrpo.env.conversation import Conversation
from agrpo.sampler.vllm import Vllm
from agrpo.scorer.functions import Functions
from agrpo.sections import Agent
from agrpo.sections import Rollout as Settings
from agrpo.types import Group, Prompt, Rollout, Turn
from tests.env.scripted_model import MAX_MODEL_LEN, Scripted, make_tokenizer
from tests.faults.table import Fault

HERE = "tests.faults.of_user_code."
PROMPT = Prompt(0, 0, [{"role": "user", "content": "What is 2 + 3?"}], {})
tokenizer = functools.cache(make_tokenizer)


def scored(function: str, folder: Path) -> str:
    """One group, then a good one: what failed must not cost the next."""
    none = np.zeros((1, 0), np.int32)
    turn = Turn(
        np.zeros(2, np.int32), np.ones(1, np.int32), np.zeros(1, np.float32), np.ones(1, bool), np.zeros(1, np.int32),
        none, none.astype(np.float32), None, "stop",
    )  # fmt: skip
    rollouts = tuple(Rollout((turn,), [{"role": "assistant", "content": "5"}]) for _ in range(3))

    async def work() -> None:
        live = await Functions(functions=["tests.faults.rewards." + function], timeout=0.7).open(None)
        try:
            await live.score(Group(0, PROMPT, rollouts, 0))
        finally:
            async with asyncio.timeout(5):
                await live.close()

    asyncio.run(work())
    return "scored"


# Environments


class World:
    """Its row says what goes wrong."""

    num_made = 0

    def __init__(self):
        World.num_made += 1
        if World.fault == "constructor raises":
            raise OSError("no such world")
        if World.fault == "constructor hangs":
            time.sleep(60)

    def reset(self, **columns):
        if World.fault == "reset raises":
            raise OSError("no such world")
        if World.fault == "reset hangs":
            time.sleep(60)
        return 7 if World.fault == "reset returns a number" else "Go."

    def get_reward(self):
        if World.fault == "get_reward raises":
            raise ZeroDivisionError("no score")
        if World.fault == "get_reward hangs":
            time.sleep(60)
        return math.nan if World.fault == "get_reward returns NaN" else 1.0

    fault = ""


def lived_in(fault: str, folder: Path) -> str:
    World.fault = ""
    player = Conversation(factory=HERE + "World", time_limit=0.4).open(tokenizer(), Vllm(), MAX_MODEL_LEN)
    World.fault = fault

    async def work() -> str:
        try:
            rollout = await player.play(PROMPT, Scripted(tokenizer(), "5"), 0, 0)
        finally:
            World.fault = ""
            async with asyncio.timeout(5):
                await player.close()
        return f"reward {rollout.reward:g}"

    return asyncio.run(work())


def sleepy(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long.

    Returns:
        A word.
    """
    time.sleep(60)
    return "done"


def called(folder: Path) -> str:
    """A tool that never returns; the model reads that it did not and goes on."""
    settings = Conversation(tools=[HERE + "sleepy"], tool_timeout=0.3, max_tool_calling_iterations=1)
    player = settings.open(tokenizer(), Vllm(), 4099)
    call = '<tool_call>\n{"name": "sleepy", "arguments": {"seconds": 60}}\n</tool_call>'

    async def work() -> str:
        rollout = await player.play(PROMPT, Scripted(tokenizer(), call, "Sorry."), 0, 0)
        await player.close()
        return rollout.completion[1]["content"]

    return "the model reads: " + asyncio.run(work())


# Agents


class Bad:
    def __init__(self, fault: str):
        self.fault = fault

    async def run(self, data, **extra):
        if self.fault == "raises":
            raise OSError("no agent")
        if self.fault == "hangs":
            await asyncio.Event().wait()
        api = openai.AsyncOpenAI(**{name: extra[name] for name in ("base_url", "api_key", "http_client")}, max_retries=0)
        await api.chat.completions.create(model="m", messages=data["messages"])
        return math.nan


def played(fault: str, folder: Path) -> str:
    section = dataclasses.replace(Settings(), agent=Agent(time_limit=0.4 if fault == "hangs" else 20.0))
    player = AgentPlayer(
        Bad(fault), tokenizer=tokenizer(), settings=section, sampler=Vllm(), max_model_len=MAX_MODEL_LEN, eos_ids=frozenset()
    )

    async def work() -> str:
        await player.start()
        try:
            return f"reward {(await player.play(PROMPT, Scripted(tokenizer(), '5'), 0, 0)).reward}"
        finally:
            await player.close()

    return asyncio.run(work())


FAULTS = [
    Fault("scorer", "raises", "group dropped: raised", partial(scored, "raising"), "no such luck"),
    Fault("scorer", "blocks for ever", "group dropped: timeout", partial(scored, "hanging"), r"hanging exceeded scorer\.timeout"),
    Fault("scorer", "its worker is killed", "group dropped: died", partial(scored, "dying"), "dying died"),
    Fault("scorer", "calls exit()", "group dropped: raised", partial(scored, "leaving"), "leaving"),
    Fault("scorer", "returns too few values", "exit code 5", partial(scored, "short"), "short"),
    Fault("scorer", "returns NaN", "exit code 5", partial(scored, "not_a_number"), "not_a_number"),
    *(Fault("environment", what, "rollout set aside: " + reason, partial(lived_in, what), says) for what, reason, says in (
        ("constructor raises", "env_create", "no such world"),
        ("constructor hangs", "env_create", r"env\.time_limit=0\.4"),
        ("reset raises", "env_reset", "no such world"),
        ("reset hangs", "env_reset", r"reset took longer than env\.time_limit=0\.4"),
        ("reset returns a number", "env_reset", "string or None"),
        ("get_reward raises", "env_reward", "no score"),
        ("get_reward hangs", "env_reward", r"get_reward took longer than env\.time_limit=0\.4"),
        ("get_reward returns NaN", "env_reward", "finite"),
    )),
    Fault("environment", "a tool hangs", "the model reads: error: sleepy gave no result in 0.3 s", called),
    Fault("agent", "raises", "OSError: no agent", partial(played, "raises")),
    Fault("agent", "hangs", "rollout set aside: agent_timeout", partial(played, "hangs"), r"rollout\.agent\.time_limit"),
    Fault("agent", "returns NaN", "exit code 5", partial(played, "returns NaN"), "nan"),
]  # fmt: skip

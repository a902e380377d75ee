"""One judge model asked in two ways: by a reward function and by a rollout loop (LOOP-17)."""

import asyncio
import dataclasses
import os
import urllib.parse
import urllib.request

from agrpo.rollout import RolloutLoop

URL = "JUDGE_URL"  # environment variable


async def ask(text: str) -> float:
    url = f"{os.environ[URL]}?{urllib.parse.urlencode({'text': text})}"

    def get():
        with urllib.request.urlopen(url, timeout=10) as answer:
            return float(answer.read())

    return await asyncio.to_thread(get)


async def judged(completions, **columns):
    return await asyncio.gather(*(ask(c[-1]["content"]) for c in completions))


class Judged(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        rollout = await super().generate_one(prompt, tools, group_id)
        return dataclasses.replace(rollout, reward=await ask(rollout.completion[-1]["content"]))

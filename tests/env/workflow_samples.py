"""Workflows, agents and values of kinds that a user may name in `rollout.workflow`."""

import asyncio

import numpy as np

from agrpo.env import workflow_context
from agrpo.env.workflow import Interaction, ModelRequest, RolloutWorkflow


class Once(RolloutWorkflow):
    """One request; the reward is the number of generated tokens."""

    def __init__(self, tokenizer, gconfig, scale=1.0):
        self.tokenizer, self.gconfig, self.scale = tokenizer, gconfig, scale

    async def arun_episode(self, engine, data):
        answer = await engine.agenerate(ModelRequest(input_ids=[5, 6, 7], gconfig=self.gconfig))
        return answer.to_tensors(reward=self.scale * answer.output_len)


class Turns(RolloutWorkflow):
    """Two requests in one row, with context between them."""

    async def arun_episode(self, engine, data):
        first = await engine.agenerate(ModelRequest(input_ids=[5, 6]))
        second = await engine.agenerate(ModelRequest(input_ids=[5, 6, *first.output_tokens, 8, 9]))
        num_context = 2
        ids = [*second.input_tokens, *second.output_tokens]
        mask = [0, 0, *[1] * first.output_len, *[0] * num_context, *[1] * second.output_len]
        logprobs = [0, 0, *first.output_logprobs, *[0] * num_context, *second.output_logprobs]
        return {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, len(ids)), bool),
            "loss_mask": np.array([mask]),
            "logprobs": np.array([logprobs], np.float32),
            "rewards": np.array([data["level"]], np.float32),
        }


class Steps(RolloutWorkflow):
    """A dictionary of interactions, in the order of creation; None for rows of level 0."""

    def __init__(self, rewards, reference=None):
        self.rewards, self.reference = rewards, reference

    async def arun_episode(self, engine, data):
        if data.get("level") == 0:
            return None
        context = workflow_context.get()
        found = {}
        for at, reward in enumerate(self.rewards):
            answer = await engine.agenerate(ModelRequest(input_ids=[4 + at]))
            name = f"{context.sample_idx}-{at}"
            found[name] = Interaction(model_response=answer, reward=reward, rollout_reward=self.reference)
        return found


class Contexts(RolloutWorkflow):
    """Notes its context before and after waiting, in itself and in a task it starts."""

    def __init__(self):
        self.seen = {}

    async def arun_episode(self, engine, data):
        before = workflow_context.get()
        await asyncio.sleep((before.sample_idx * 7 % 5) / 500)

        async def inner():
            await asyncio.sleep(0.001)
            return workflow_context.get(), workflow_context.stat_scope()

        started, scope = await asyncio.create_task(inner())
        self.seen[before.task_id, before.sample_idx] = (workflow_context.get(), started, scope)
        return None


class Given(RolloutWorkflow):
    """Returns whatever it was made with."""

    def __init__(self, result):
        self.result = result

    async def arun_episode(self, engine, data):
        return self.result


class Blocking(RolloutWorkflow):
    def arun_episode(self, engine, data):
        return None


class Agent:
    async def run(self, data, **extra):
        return 1.0


class Sleeper:
    def run(self, data):
        return 1.0


class Needs:
    def __init__(self, level):
        self.level = level

    async def run(self, data):
        return self.level


ready_made = Given(None)
number = 7

"""The rollout process against a zero-latency server: generated tokens per second of one core, through to the wire.

Client, player, scoring (trivial), advantage, stitching and wire encoding are the real ones; the server is a process of its
own whose answers are serialised beforehand, and the trainer's end only reads. Time is CPU time of this process.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from typing import Any

import numpy as np

from agrpo import wire
from agrpo.advantage import Grouped
from agrpo.env.player import Player, Rules
from agrpo.env.render import Renderer
from agrpo.metrics.window import Window
from agrpo.rollout.concurrency import Cap, Places
from agrpo.rollout.failures import Failures
from agrpo.rollout.judge import Judge
from agrpo.rollout.loop import Loop, Policy
from agrpo.rollout.play import Slots
from agrpo.rollout.server_watch import ServerWatch
from agrpo.sampler.vllm import Vllm
from agrpo.sections import Rollout as Settings
from agrpo.types import Group, Prompt
from tests.stub_server import stub_server

TOKENS, HEADS, GROUPS, LIMIT = 512, 8, 48, 60_000


class Words:
    """A tokenizer whose prompt is always the same 256 ids; its cost is not what is measured."""

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return list(range(2, 258))

    def decode(self, ids: np.ndarray, skip_special_tokens: bool = True) -> str:
        return "x" * len(ids)


class ByTokens:
    """Scores by the first generated token: cheap, and different within a group."""

    async def score(self, group: Group) -> Group:
        scored = (dataclasses.replace(r, rewards={"first": float(r.turns[0].output_ids[0])}) for r in group.rollouts)
        return dataclasses.replace(group, rollouts=tuple(scored))


class Prompts:
    def prompt_of(self, group_id: int) -> Prompt:
        return Prompt(group_id, 0, [{"role": "user", "content": "?"}], {})


class Sink:
    """The wire without a socket: every ready group is encoded to the buffers of its frame."""

    def __init__(self, num_groups: int):
        self.start = wire.Start(0, 1, [], [], 0, 0, 1 << 40)
        self._left, self._end = num_groups, asyncio.Event()
        self.num_tokens = self.num_bytes = 0

    async def incoming(self) -> Any:
        await self._end.wait()
        yield wire.Finish()

    async def send_ready(self, group: Any) -> None:
        self.num_bytes += sum(memoryview(b).nbytes for b in wire.encode(group))
        self.num_tokens += sum(s.num_trained_tokens for s in group.samples)
        self._left -= 1
        if self._left == 0:
            self._end.set()

    async def send_resolved(self, group_id: int, reason: str) -> None:
        raise AssertionError(f"group {group_id} was dropped: {reason}")

    async def send_metrics(self, window: dict[str, Any]) -> None:
        wire.encode(wire.Metrics(window))

    async def send_eval(self, name: str, result: dict[str, float]) -> None:
        wire.encode(wire.EvalResult(name, result))


class Quiet:
    done: collections.Counter[str] = collections.Counter()

    def beat(self, *_: Any, **__: Any) -> None:
        pass

    span = beat


async def produce(url: str, num_groups: int, heads: int = HEADS) -> tuple[int, float, float]:
    """Generated tokens, CPU seconds and wall seconds of this process for `num_groups` groups of 8."""
    settings, window, policy, sink = Settings(max_concurrent_rollouts=64), Window(), Policy(1), Sink(num_groups)
    sampler = Vllm(max_completion_length=TOKENS, num_sampler_logprobs=max(heads, 1))
    client = await sampler.connect((url,), None, 42, lambda: policy.version, 60.0, 64, heads > 0, window)
    async with client:
        player = Player(Words(), Rules(client.max_model_len, frozenset({1})), {"": Renderer(Words())})
        cap = Cap(64, 64)
        places = Places(cap)
        slots = Slots(player, client, places, Failures(0.5, 256), False)
        loop = Loop(
            settings=settings,
            prompts=Prompts(),
            player=player,
            client=client,
            judge=Judge(ByTokens(), Grouped(), settings, TOKENS, 16, 8, None, window),
            slots=slots,
            places=places,
            watch=ServerWatch(client, cap, places, 5.0, window),
            link=sink,
            policy=policy,
            evaluations={},
            window=window,
            life=Quiet(),
        )
        cpu, wall = time.process_time(), time.perf_counter()
        await loop.run()
        return sink.num_tokens, time.process_time() - cpu, time.perf_counter() - wall


def run() -> list[dict[str, Any]]:
    with stub_server(tokens=TOKENS, heads=HEADS, bodies=16) as url:
        asyncio.run(produce(url, 8))  # connections, imports and caches
        tokens, cpu_s, wall_s = asyncio.run(produce(url, GROUPS))
    value = tokens / cpu_s
    return [
        {"bar": "rollout", "value": round(value), "unit": "tokens/s/core", "limit": LIMIT, "ok": value >= LIMIT},
        {"bar": "rollout_wall", "value": round(tokens / wall_s), "unit": "tokens/s", "limit": None, "ok": True},
    ]

"""What failing rollouts cost the good ones: 10 % raise, 5 % hang until their time limit, 5 % get rubbish from the server.

The good rollouts of that run per second, next to 0.8 times those of a clean run of the same loop over the same server.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from agrpo import wire
from agrpo.rollout import RolloutLoop
from agrpo.sections import Agent
from tests.fault_proxy import fault_proxy
from tests.rollout.loop_faults import Faulty, rubbish
from tests.rollout.loop_harness import TOKENS, G, produce, until
from tests.stub_server import stub_server

NUM_GROUPS, ROLLOUT_S, LIMIT_S, LIMIT = 300, 0.2, 0.6, 0.85


class Steady(RolloutLoop):
    """Each rollout takes ROLLOUT_S."""

    async def generate_one(self, prompt: Any, tools: Any, group_id: int) -> Any:
        await asyncio.sleep(ROLLOUT_S)
        return await super().generate_one(prompt, tools, group_id)


class SteadyFaulty(Faulty, Steady):
    """The same of those that do not fail."""


def good_per_s(url: str, loop_class: type) -> float:
    """Rollouts that reached the trainer's end or a group dropped for its others, per second."""

    async def until_many(trainer: Any, loop: Any) -> None:
        await until(lambda: trainer.num_done >= NUM_GROUPS, 120)

    start, began = wire.Start(0, 1, [], [], 0, 0, 10**9), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = produce(
            url, Path(folder), until_many, start=start, cap=48, loop_class=loop_class, agent=Agent(time_limit=LIMIT_S)
        )
    wall_s = time.perf_counter() - began
    failed = trainer.window.total("rollout/failed_count")
    return (trainer.num_done * G - failed) / wall_s


def run() -> list[dict[str, Any]]:
    logging.getLogger("agrpo").setLevel(logging.CRITICAL)  # each injected failure would be a line
    with stub_server(tokens=TOKENS, heads=2, bodies=11) as url:
        clean = good_per_s(url, Steady)
        with fault_proxy(url, rubbish()) as proxy:
            faulty = good_per_s(proxy.url, SteadyFaulty)
    value = round(faulty / (0.8 * clean), 3)
    return [{"bar": "faults", "value": value, "unit": "x", "limit": LIMIT, "ok": value >= LIMIT}]

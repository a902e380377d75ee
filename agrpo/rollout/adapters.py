"""Which adapter a rollout asks for, where each version of the policy is one: the newest at its start, to its end (LORA-10)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.errors import RolloutFailure
from agrpo.rollout.staleness import STALE
from agrpo.sync.adapter import adapter_name
from agrpo.types import Turn

_LOOK_S = 0.2  # between two tries of an adapter that its server does not have now

Generate = Callable[..., Awaitable[Turn]]


@dataclass(frozen=True, slots=True)
class Adapters:
    """The versions that servers keep: the newest and `max_staleness` before it."""

    prefix: str
    version: Callable[[], int]  # that the servers are known to serve
    max_staleness: int
    timeout_s: float

    def pinned(self, generate: Generate, version: int | None = None) -> Generate:
        """`generate` under the adapter of `version`, null = the newest; ended as stale once that has left the window."""
        version = self.version() if version is None else version
        name = adapter_name(self.prefix, version)

        async def ask(*arguments: Any, **options: Any) -> Turn:
            deadline = time.monotonic() + self.timeout_s
            while True:
                self._check(version)
                try:
                    turn = await generate(*arguments, **options, model=name)
                except RolloutFailure as failure:
                    if failure.reason != "rejected" or name not in failure.text:
                        raise
                    # Just unloaded and not yet said, or a restarted server that is about to get it again.
                    self._check(version)
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(_LOOK_S)
                    continue
                # The server's own label is that of its base weights.
                return dataclasses.replace(turn, versions=np.full(len(turn.output_ids), version, np.int32))

        return ask

    def _check(self, version: int) -> None:
        age = self.version() - version
        if age > self.max_staleness:
            raise RolloutFailure(
                STALE,
                f"the adapter of version {version} is unloaded: the newest is {self.version()} and "
                f"rollout.max_staleness={self.max_staleness}",
            )

"""Rollouts that no step can use any more are given up while they run, so that the server's time goes to fresh ones.

A step that takes a rollout's samples has at least the version known here. So once that version is more than
`rollout.max_staleness` above the rollout's oldest token, every pull would drop it (STA-3), whatever is generated yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agrpo.errors import RolloutFailure
from agrpo.types import Turn

STALE = "stale"


@dataclass(slots=True)
class Running:
    """One rollout in flight: since when, how old its oldest token is, and the requests it waits for."""

    window: VersionWindow | None = None  # what it must stay in; None = it is never too old
    group_version: int | None = None  # dates it under staleness_stamp=group; None dates it by its tokens
    began: float = field(default_factory=time.monotonic)
    is_given_up: bool = False  # one of its requests was taken back
    _asked_at: int | None = None  # version known when its first request was sent
    _oldest: int | None = None  # version of the oldest token of its finished turns
    _requests: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def version(self) -> int | None:
        """The oldest version in it; None while it has asked for no token. Tokens under way count from their request."""
        if self.group_version is not None:
            return self.group_version
        return self._asked_at if self._oldest is None else self._oldest

    def watched(
        self, generate: Callable[..., Awaitable[Turn]], window: VersionWindow
    ) -> Callable[..., Awaitable[Turn]]:
        """`generate`, ended by RolloutFailure("stale") as soon as the rollout is given up; its connection is closed,
        which makes the server drop the request."""

        async def ask(*arguments: Any, **options: Any) -> Turn:
            if self._asked_at is None:
                self._asked_at = window.version()
            if window.is_over(self):
                self.is_given_up = True
                raise RolloutFailure(STALE, window.text(self))
            try:
                async with asyncio.timeout(None) as request:
                    self._requests.add(request)
                    turn = await generate(*arguments, **options)
            except TimeoutError:
                if not request.expired():
                    raise
                raise RolloutFailure(STALE, window.text(self)) from None
            finally:
                self._requests.discard(request)
            oldest = int(turn.versions.min())
            self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)
            return turn

        return ask

    def give_up(self) -> None:
        """Take back the requests under way."""
        now = asyncio.get_running_loop().time()
        for request in self._requests:
            self.is_given_up = True
            if not request.expired():
                request.reschedule(now)


@dataclass(frozen=True, slots=True)
class VersionWindow:
    """The versions whose tokens may still be trained."""

    version: Callable[[], int]  # that the servers are known to serve
    max_staleness: int

    def is_over(self, running: Running) -> bool:
        oldest = running.version
        return oldest is not None and self.version() - oldest > self.max_staleness

    def text(self, running: Running) -> str:
        return (
            f"its oldest token is of version {running.version}, the servers have {self.version()}, and "
            f"rollout.max_staleness={self.max_staleness} allows no step to train it any more"
        )

"""The servers a client asks: which one a group belongs to, which are up, and how one that was down comes back.

    up --(unreachable, 503, weights of no version)--> down --(probe succeeds)--> up

A group stays with one server, and there with one engine, so that its prompt is cached once. While that server is down
its groups are spread over the others; it gets them back when it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Server:
    """One address and what is known about it."""

    url: str
    speaks_tokens: bool = True  # offers the token endpoint
    num_engines: int = 1  # data-parallel engines behind the address
    is_labelled: bool = False  # has named a weight version in an answer
    down: str | None = None  # why it is not asked; None = up
    num_relapses: int = 0  # times it went down since its last good answer
    _looking: asyncio.Task[bool] | None = field(default=None, repr=False)

    def engine_of(self, group_id: int, num_servers: int) -> int | None:
        """The engine that holds the group's prefix; None where there is only one."""
        return group_id // num_servers % self.num_engines if self.num_engines > 1 else None


class Servers:
    """All servers of a run. `looks_well` asks one whether it could answer now; it must not raise."""

    def __init__(self, urls: list[str], looks_well: Callable[[Server], Awaitable[bool]], retry_wait_s: float):
        self.all = [Server(url) for url in urls]
        self._looks_well, self._retry_wait_s = looks_well, retry_wait_s
        self._back = asyncio.Event()  # set while at least one is up
        self._back.set()
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> list[Server]:
        return [server for server in self.all if server.down is None]

    def of(self, group_id: int, avoid: Server | None = None) -> Server | None:
        """The group's own server, or its stand-in while that is down or to be avoided; None while all are down."""
        own = self.all[group_id % len(self.all)]
        if own.down is None and own is not avoid:
            return own
        others = [server for server in self.up if server is not avoid] or self.up
        return others[group_id // len(self.all) % len(others)] if others else None

    async def wait_for_one(self, deadline: float) -> bool:
        """Until a server is up; false once `deadline` (time.monotonic) has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._back.wait()
                return True
        return False

    async def is_well(self, server: Server, why: str) -> bool:
        """Look at a server after a failure: true if it could answer now, else it is down because of `why`.

        All requests that fail together look once.
        """
        if server.down is not None:
            return False
        if server._looking is None or server._looking.done():
            server._looking = asyncio.create_task(self._looks_well(server))
        if not await asyncio.shield(server._looking):
            self.take_down(server, why)
        return server.down is None

    def take_down(self, server: Server, why: str) -> None:
        """Ask this server no more until a probe succeeds."""
        if server.down is not None:
            return
        server.down = why
        server.num_relapses += 1
        _log.warning("%s is asked no more until it answers again: %s", server.url, why[:500])
        if not self.up:
            self._back.clear()
        task = asyncio.create_task(self._bring_back(server))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _bring_back(self, server: Server) -> None:
        """Probe until it is well; a server that falls again and again is given more time. Ended by `close`."""
        began, wait = time.monotonic(), self._retry_wait_s * min(2 ** (server.num_relapses - 1), 16)
        while True:
            await asyncio.sleep(wait * random.uniform(1.0, 1.25))
            if await self._looks_well(server):
                break
            wait = max(wait, min(2 * wait, 4 * self._retry_wait_s))
        server.down = None
        self._back.set()
        _log.warning("%s answers again after %.0f s", server.url, time.monotonic() - began)

    async def close(self) -> None:
        tasks = [*self._probes, *(s._looking for s in self.all if s._looking is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

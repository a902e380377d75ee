"""How many rollouts may be in flight: the cap that follows the server's KV cache, and the places below it (CONC).

A decrease never interrupts a rollout; new ones wait. The cap is raised only on evidence: the cache has room, nothing
waits, the cap was reached, and as many rollouts as the cap have completed since it last changed.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from dataclasses import dataclass

RAISE_BELOW, LOWER_ABOVE = 0.6, 0.8  # KV-cache usage
RAISE, LOWER = (5, 4), (7, 10)  # as fractions: the float 0.7 * 170 is below 119


@dataclass(slots=True)
class Cap:
    """The live cap; no clock, no I/O. 1,000,000 cache tokens and a context of 4096 start it at 244, then 305, then 213."""

    maximum: int  # rollout.max_concurrent_rollouts
    value: int
    raise_only_when_reached: bool = True
    num_in_flight: int = 0
    _num_completed: int = 0  # since the last change
    _reached: bool = False  # in-flight rollouts reached the cap since the last change
    _draining: bool = False  # lowered, and in-flight rollouts are still above it
    _skip_next_poll: bool = False

    @staticmethod
    def first(
        kv_cache_tokens: int | None,
        max_model_len: int,
        maximum: int,
        raise_only_when_reached: bool,
        resumed: int | None = None,
    ) -> Cap:
        """The cap before any poll (CONC-2), or where a resumed run left it; without a known cache the maximum (CONC-9)."""
        if resumed is not None:
            return Cap(maximum, min(max(resumed, 1), maximum), raise_only_when_reached)
        value = maximum if kv_cache_tokens is None else min(max(kv_cache_tokens // max_model_len, 1), maximum)
        return Cap(maximum, value, raise_only_when_reached)

    @property
    def has_room(self) -> bool:
        return self.num_in_flight < self.value

    def started(self) -> None:
        self.num_in_flight += 1
        self._reached |= self.num_in_flight >= self.value

    def completed(self) -> None:
        self.num_in_flight -= 1
        self._num_completed += 1
        self._draining &= self.num_in_flight > self.value

    def synced(self) -> None:
        """A weight sync emptied the cache and preempted every request: the next poll says nothing (CONC-11)."""
        self._skip_next_poll = True

    def poll(self, usage: float, num_waiting: float, paused: bool) -> bool:
        """React to one look at the server; false where it was taken in a weight sync or right after one."""
        if paused or self._skip_next_poll:
            self._skip_next_poll = paused
            return False
        if usage > LOWER_ABOVE and not self._draining:
            self._change(max(1, self.value * LOWER[0] // LOWER[1]))
            self._draining = self.num_in_flight > self.value
        elif usage < RAISE_BELOW and num_waiting == 0 and self._num_completed >= self.value and self._may_raise():
            self._change(min(max(self.value + 1, self.value * RAISE[0] // RAISE[1]), self.maximum))
        return True

    def _may_raise(self) -> bool:
        return self.value < self.maximum and (self._reached or not self.raise_only_when_reached)

    def _change(self, value: int) -> None:
        self.value, self._num_completed = value, 0
        self._reached = self.num_in_flight >= value


class Places:
    """Places in flight, handed out in the order they are asked for, evaluations first."""

    def __init__(self, cap: Cap):
        self.cap = cap
        self.on_change: Callable[[], None] = lambda: None  # called whenever room may have appeared
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._num_holds = 0

    @property
    def has_room(self) -> bool:
        """A place is free and nobody waits for one."""
        return not self._waiting and self.cap.has_room and not self._num_holds

    def ask(self, is_first: bool = False) -> asyncio.Future[None]:
        """A place, yours when the future is done; asking is what orders, so ask before anything is awaited.

        `is_first`: before all who wait already.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(future) if is_first else self._waiting.append(future)
        self.hand_out()
        return future

    def give_back(self) -> None:
        self.cap.completed()
        self.hand_out()

    def hand_out(self) -> None:
        """Give free places to those who wait."""
        while self._waiting and self.cap.has_room and not self._num_holds:
            future = self._waiting.popleft()
            if not future.done():
                self.cap.started()
                future.set_result(None)
        self.on_change()

    def hold(self) -> None:
        """No rollout starts until `let_go`: finished groups have nowhere to go (ARCH-11)."""
        self._num_holds += 1

    def let_go(self) -> None:
        self._num_holds -= 1
        self.hand_out()

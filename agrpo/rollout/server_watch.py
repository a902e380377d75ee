"""Polls the servers' load for the concurrency cap and the metrics (CONC-3, CONC-9 to CONC-11, CONC-15)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

from agrpo.errors import ServerError
from agrpo.rollout import report
from agrpo.rollout.concurrency import Cap, Places

_log = logging.getLogger(__name__)
_WARN_AFTER = 12  # failed polls in a row


@dataclass(slots=True)
class PollTimes:
    """When to look next; no clock, no I/O.

    Every `interval_s`, except that a sync sets the times anew. The first look after it says nothing (CONC-11); were it
    taken on the usual beat, syncs that follow each other faster than two beats would leave no look that says anything.
    So the first look comes after a quarter of the time that lay between the last two syncs, the second after a half, both
    no later than usual. Where that still falls into the next sync, the share is halved.
    """

    interval_s: float
    due: float  # when to look next
    _synced_at: float | None = None
    _between_s: float = float("inf")  # the last two syncs
    _share: float = 0.5  # of that time, when the look that counts is taken
    _is_first: bool = False  # no look since the last sync

    def synced(self, now: float) -> None:
        if self._synced_at is not None:
            self._between_s = now - self._synced_at
        self._synced_at, self._is_first = now, True
        self.due = now + min(self.interval_s, self._between_s * self._share / 2)

    def failed(self, now: float) -> None:
        self.due = now + self.interval_s

    def looked(self, now: float, paused: bool) -> None:
        """A look was taken; `paused`: in the middle of a sync."""
        self.due = now + self.interval_s
        if paused:
            self._share = max(self._share / 2, 1 / 64)
        elif self._is_first and self._synced_at is not None:
            self.due = min(self.due, self._synced_at + max(self._between_s * self._share, now - self._synced_at))
        self._is_first = False


class ServerWatch:
    """Looks at the servers and moves the cap."""

    def __init__(self, client: Any, cap: Cap, places: Places, interval_s: float, window: Any):
        self._client, self._cap, self._places, self._window = client, cap, places, window
        self._times = PollTimes(interval_s, time.monotonic() + interval_s)
        self._changed = asyncio.Event()
        self._num_failed = 0
        self._preemptions: dict[str, float] = {}  # per server, as last seen

    def synced(self) -> None:
        """The servers have resumed with new weights: the sync emptied their caches and preempted every request."""
        self._cap.synced()
        self._times.synced(time.monotonic())
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._until_due()
            try:
                load = await self._client.poll_load()
            except ServerError as error:
                self._num_failed += 1
                if self._num_failed == _WARN_AFTER:
                    _log.warning("%d polls of the server's metrics failed in a row: %s", _WARN_AFTER, error)
                self._times.failed(time.monotonic())
                continue
            self._num_failed = 0
            self._times.looked(time.monotonic(), load is not None and load.paused)
            if load is not None:
                self._take(load)

    async def _until_due(self) -> None:
        while (left := self._times.due - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _take(self, load: Any) -> None:
        preempted = 0.0
        for url, count in load.num_preemptions.items():
            last = self._preemptions.get(url, count)
            preempted += count if count < last else count - last  # one that fell started again from zero (CONC-15)
            self._preemptions[url] = count
        if self._cap.poll(load.kv_cache_usage, load.num_waiting, load.paused):
            report.record_load(self._window, load, preempted)
        self._places.hand_out()

"""Polls the servers' load for the concurrency cap and the metrics (CONC-3, CONC-9 to CONC-11, CONC-15)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from agrpo.errors import ServerError
from agrpo.rollout import report
from agrpo.rollout.concurrency import Cap, Places

_log = logging.getLogger(__name__)
_WARN_AFTER = 12  # failed polls in a row


class ServerWatch:
    """Looks at the servers every `interval_s` seconds and moves the cap."""

    def __init__(self, client: Any, cap: Cap, places: Places, interval_s: float, window: Any):
        self._client, self._cap, self._places, self._window = client, cap, places, window
        self._interval_s = interval_s
        self._num_failed = 0
        self._preemptions: dict[str, float] = {}  # per server, as last seen

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                load = await self._client.poll_load()
            except ServerError as error:
                self._num_failed += 1
                if self._num_failed == _WARN_AFTER:
                    _log.warning("%d polls of the server's metrics failed in a row: %s", _WARN_AFTER, error)
                continue
            self._num_failed = 0
            if load is not None:
                self._take(load)

    def _take(self, load: Any) -> None:
        preempted = 0.0
        for url, count in load.num_preemptions.items():
            last = self._preemptions.get(url, count)
            preempted += count if count < last else count - last  # one that fell started again from zero (CONC-15)
            self._preemptions[url] = count
        if self._cap.poll(load.kv_cache_usage, load.num_waiting, load.paused):
            report.record_load(self._window, load, preempted)
        self._places.hand_out()

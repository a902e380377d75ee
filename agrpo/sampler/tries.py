"""The tries of one request: how many failures are borne, how long the next one waits, and when it is given up."""

from __future__ import annotations

import asyncio
import random
import time

from agrpo.errors import RolloutFailure
from agrpo.sampler.answer import Unsynced
from agrpo.sampler.connection import Retryable
from agrpo.sampler.servers import Server


class Tries:
    """How often one request may fail, and until when."""

    def __init__(self, max_retries: int, timeout_s: float, retry_wait_s: float):
        self._max_retries, self._timeout_s, self._retry_wait_s = max_retries, timeout_s, retry_wait_s
        self.deadline = time.monotonic() + timeout_s  # the first failure sets it anew
        self.error: Retryable | Unsynced | None = None  # the last one
        self.failed_on: Server | None = None  # asked last; another one is preferred now
        self._num_failed = self._num_counted = 0

    def failed(self, server: Server, error: Retryable | Unsynced) -> None:
        if self.error is None:
            self.deadline = time.monotonic() + self._timeout_s
        self.error, self.failed_on = error, server
        self._num_failed += 1

    async def wait(self) -> None:
        """Before the next try, after a failure that counts; RolloutFailure if there is none."""
        self._num_counted += 1
        wait = self._retry_wait_s * min(2 ** (self._num_counted - 1), 16) * random.uniform(1.0, 1.25)
        wait = max(wait, self.error.after_s)
        if self._num_counted > self._max_retries or time.monotonic() + wait > self.deadline:
            raise RolloutFailure(self.error.reason, f"{self.error.text} ({self._num_failed} tries)") from self.error
        await asyncio.sleep(wait)

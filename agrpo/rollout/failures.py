"""Failed rollouts: counted per reason, shown in the log, and the circuit breaker on their rate (GEN-13, GEN-17)."""

from __future__ import annotations

import collections
import logging

from agrpo.errors import ServerError
from agrpo.types import Rollout

_log = logging.getLogger(__name__)
NO_ERRORS = {"prompt_too_long", "stale", "returned_none"}  # reasons that say nothing about the health of the run
_SHOWN = 10  # failures per reason written to the log in full; after them every hundredth


class Failures:
    """`count` every finished rollout; ServerError once too many of the last ones failed."""

    def __init__(self, max_frac: float, window: int, at_once: int = 16):
        """The rate is looked at from `at_once` finished rollouts on (less if the window is smaller)."""
        self._max_frac, self._at_least = max_frac, min(window, at_once)
        self._last: collections.deque[str | None] = collections.deque(maxlen=window)
        self._seen: collections.Counter[str] = collections.Counter()

    def count(self, rollout: Rollout) -> None:
        if rollout.failure in NO_ERRORS:
            return
        self._last.append(rollout.failure)
        if rollout.failure is None:
            return
        self._seen[rollout.failure] += 1
        seen = self._seen[rollout.failure]
        if seen <= _SHOWN or seen % 100 == 0:
            _log.warning("rollout failed (%s, number %d): %s", rollout.failure, seen, rollout.failure_text)
        failed = collections.Counter(reason for reason in self._last if reason is not None)
        if len(self._last) >= self._at_least and failed.total() > self._max_frac * len(self._last):
            reasons = ", ".join(f"{reason} {n}" for reason, n in failed.most_common())
            raise ServerError(
                f"{failed.total()} of the last {len(self._last)} rollouts failed ({reasons}), more than "
                f"rollout.max_failure_frac={self._max_frac:g}; the last: {rollout.failure_text}"
            )

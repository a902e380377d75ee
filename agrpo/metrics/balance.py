"""The end-of-run balance of generated tokens: what was trained, what was discarded and why, what is left."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

_DISCARDED = "tokens/discarded/"


class TokenBalance:
    """Totals since the process started; every figure is a number of generated tokens.

    `reported` takes what the rollout process counted, the rest is the trainer's. What was sent and has not been received
    is still in flight.
    """

    def __init__(self) -> None:
        self._generated = self._sent = self._in_flight = self._received = self._restored = self._trained = 0
        self._discarded: collections.Counter[str] = collections.Counter()

    def reported(self, window: Mapping[str, Any]) -> None:
        """The wire form of one window of the rollout process."""
        for name, (value, _) in window.items():
            if name.startswith(_DISCARDED):
                self._discarded[name.removeprefix(_DISCARDED)] += int(value)
        self._generated += int(window.get("tokens/generated", (0,))[0])
        self._sent += int(window.get("tokens/sent", (0,))[0])
        self._in_flight = int(window.get("tokens/in_flight", (self._in_flight,))[0])

    def received(self, count: int) -> None:
        self._received += count

    def restored(self, count: int) -> None:
        """Untrained tokens that a checkpoint held."""
        self._restored += count

    def trained(self, count: int) -> None:
        self._trained += count

    def discarded(self, reason: str, count: int) -> None:
        self._discarded[reason] += count

    def totals(self, untrained: int) -> dict[str, Any]:
        """`untrained` tokens wait for a step. `unaccounted` is generated + restored less all the others: always 0."""
        in_flight = self._in_flight + self._sent - self._received
        gone = self._trained + self._discarded.total() + in_flight + untrained
        return {
            "generated": self._generated,
            "restored": self._restored,
            "trained": self._trained,
            "discarded": dict(sorted(self._discarded.items())),
            "in_flight": in_flight,
            "untrained": untrained,
            "unaccounted": self._generated + self._restored - gone,
        }

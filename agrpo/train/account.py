"""What the rollout process is told about how many tokens it may start."""

from __future__ import annotations

from collections.abc import Callable

from agrpo import wire
from agrpo.ledger import AdmissionCredit


class Account:
    """The admission credit as the wire states it (STA-4). The feeder's lock guards it."""

    def __init__(self, credit: AdmissionCredit):
        self.credit, self.gate_closed = credit, False
        # Samples restored from a checkpoint were never sent on this wire: its counters start that much below zero.
        self.restored_tokens = 0
        self._raw_tokens = self._unique_tokens = 0

    def planned(self, raw: int, unique: int) -> None:
        """A step of `raw` tokens is planned, of which `unique` are forwarded."""
        self._raw_tokens += raw
        self._unique_tokens += unique

    def message(self, open_tokens: Callable[[], tuple[int, int]]) -> wire.Credit:
        """The counters now; before the first step is planned, the samples that wait for it say how much they share."""
        raw, unique = (self._raw_tokens, self._unique_tokens) if self._unique_tokens else open_tokens()
        return wire.Credit(
            taken_tokens=self.credit.taken_tokens - self.restored_tokens,
            pulled_tokens=self.credit.pulled_tokens - self.restored_tokens,
            limit_tokens=self.credit.limit_tokens(raw / unique if unique else 1.0),
            gate_closed=self.gate_closed,
        )

"""Log-probs of a step's rows under the weights at its start, for losses that clip around that policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agrpo.model.terms import DeviceRow, token_terms


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One forward without gradient per row of every update but the first, which itself has the weights of the start."""

    temperature: float

    def of(self, model: torch.nn.Module, rows: tuple[Any, ...], num_updates: int, device: torch.device) -> list[Any]:
        """[rows] of [M] log-probs, None for the rows of the first update; collective where the model is sharded."""
        first = len(rows) // num_updates
        with torch.no_grad():
            found = [
                token_terms(model, DeviceRow.of(row, device), self.temperature, want_head=False).trainer_logprobs
                for row in rows[first:]
            ]
        return [None] * first + found


class NotNeeded:
    """Where the loss asks for no such log-probs."""

    def of(self, model: torch.nn.Module, rows: tuple[Any, ...], num_updates: int, device: torch.device) -> list[Any]:
        return [None] * len(rows)

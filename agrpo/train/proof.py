"""The trainer's half of the proof of arrival: log-probs of the server's tokens and of its alternatives to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from agrpo.model.terms import DeviceRow, sequence_row, token_terms


def prove(
    proof: Any, model: torch.nn.Module, version: int, device: torch.device, served_as: str | None = None
) -> float:
    """Mean abs log-prob difference to the server under `version`; raises ServerError above the limit. Collective.

    `served_as` is the name of an adapter, None where the version is the server's own weights.
    """

    def trainer_logprobs(token_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
        row = sequence_row(token_ids)
        # Every position of the row is a loss term; only the last ones were sampled by the server.
        head_ids = np.zeros((len(token_ids) - 1, ids.shape[1]), np.int32)
        head_ids[-len(ids) :] = ids
        head = np.zeros_like(head_ids, dtype=np.float32)
        fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
        row = type(row)(**{**fields, "head_ids": head_ids, "head_logprobs": head})
        with torch.no_grad(), without_dropout(model):
            terms = token_terms(model, DeviceRow.of(row, device), 1.0, want_head=True)
        return terms.head_trainer_logprobs[-len(ids) :].float().cpu().numpy()

    return proof.check(trainer_logprobs, version, served_as)


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """As the server computes; and no random number is drawn, so that a resumed run draws those of an uninterrupted one."""
    active = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    for module in active:
        module.eval()
    try:
        yield
    finally:
        for module in active:
            module.train()

"""Candidate sets of truncated sampling: each loss term's probabilities are renormalised over its own set (SAMP-1, SAMP-7).

Outside the sets the gradient of the logits is 0, so the backward pass works on the sets' entries alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agrpo.model.plan import on_device
from agrpo.types import Ragged

if TYPE_CHECKING:
    from agrpo.model.head_torch import Scaling

_ENTRIES = 1 << 13  # taken at once, each with a row of the hidden size


@dataclass(frozen=True, slots=True)
class Kept:
    """The candidate sets, flat: entry i keeps token `ids[i]` at term `terms[i]`; by term, then id, each once."""

    ids: torch.Tensor  # [C] int64
    terms: torch.Tensor  # [C] int64
    by_id: torch.Tensor  # [C] int64, the entries in the order of their ids
    ranked_ids: np.ndarray  # [C] their ids in that order, on the host: no slice has to ask the device for its bounds

    @staticmethod
    def of(sets: Ragged, device: torch.device | str) -> Kept:
        """Set i belongs to loss term i."""
        terms = np.repeat(np.arange(len(sets), dtype=np.int64), np.diff(sets.offsets))
        keys = np.unique(_key(terms, sets.values.astype(np.int64)))
        terms, ids = keys >> 32, keys & 0xFFFFFFFF
        by_id = np.argsort(ids, kind="stable")
        return Kept(*(on_device(x, torch.device(device)) for x in (ids, terms, by_id)), ids[by_id])

    def between(self, first: int, last: int) -> tuple[int, int]:
        """The range of `by_id` whose ids are first to last - 1."""
        start, end = np.searchsorted(self.ranked_ids, [first, last])
        return int(start), int(end)

    def pick(self, product: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """Copy the entries of the slice `product` [M, w] to their places in `out` [C]."""
        start, end = self.between(first, first + product.shape[1])
        entries = self.by_id[start:end]
        out[entries] = product[self.terms[entries], self.ids[entries] - first]

    def places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The entry of each of `ids` [M, K], and whether its term's set has it."""
        keys = _key(self.terms, self.ids)
        wanted = _key(torch.arange(len(ids), device=ids.device)[:, None], ids)
        entry = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        return entry, keys[entry] == wanted

    def log_mass(self, logits: torch.Tensor, num_terms: int) -> torch.Tensor:
        """[num_terms] logsumexp of each set, from the entries' logits [C]."""
        peak = logits.new_full((num_terms,), -torch.inf).scatter_reduce_(0, self.terms, logits, "amax")
        mass = torch.zeros_like(peak).index_add_(0, self.terms, (logits - peak[self.terms]).exp())
        return peak + mass.log()

    def derivative(
        self, logits: torch.Tensor, log_mass: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, scaling: Scaling
    ) -> torch.Tensor:
        """[C] gradient of the head's products at the entries, from that of the log-probs of `ids`, both [M, K]."""
        entry, is_kept = self.places(ids)
        grad = (grad * scaling.slope).where(is_kept, grad.new_zeros(()))
        out = (logits - log_mass[self.terms]).exp_().mul_(-grad.sum(1)[self.terms])
        return scaling.bend(out.index_add_(0, entry.flatten(), grad.flatten()), logits)

    def chunks(self, values: torch.Tensor, first: int, last: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The entries with ids first to last - 1, some at a time: `values`, terms and ids."""
        start, end = self.between(first, last)
        for at in range(start, end, _ENTRIES):
            entries = self.by_id[at : min(at + _ENTRIES, end)]
            yield values[entries], self.terms[entries], self.ids[entries]


def _key(terms, ids):
    return (terms << 32) + ids

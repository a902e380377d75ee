"""What each sample's terms count in the loss of a step: exact over all microbatches and ranks, because it is planned whole.

Every aggregation is one number per sample, by which each of its terms is multiplied. Two samples of one prompt with 1 and
3 trained tokens, and a third sample with 4 tokens of another prompt:

    token      1/8   1/8   1/8       every token equal
    sequence   1/3   1/9   1/12      mean over samples of the mean over their tokens
    prompt     1/8   1/8   1/8       mean over prompts of the mean over their tokens: (1 + 3) and 4 tokens
    constant   1/3L  1/3L  1/3L      mean over samples of the sum over their tokens / L
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.types import Microbatch, Row, Step

Shares = list[list[np.ndarray]]  # [microbatches][ranks], each [samples of the row] float32


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a loss divides a step: `num_updates` parts of it, each whole or by microbatch (LOSS-17)."""

    aggregation: str = "token"
    by_microbatch: bool = False
    num_updates: int = 1
    length: int = 1  # L of `constant`

    @staticmethod
    def of(loss: Any, max_completion_length: int) -> Sharing:
        """As the loss's settings say; one without them counts tokens over the step."""
        return Sharing(
            aggregation=getattr(loss, "aggregation", "token"),
            by_microbatch=getattr(loss, "normalization", "step") == "microbatch",
            num_updates=getattr(loss, "updates_per_step", 1),
            length=getattr(loss, "length", None) or max_completion_length,
        )

    def of_step(self, step: Step) -> Shares:
        """The shares of every row. Those of all terms of one update add up to 1, except with `constant`."""
        size = len(step.microbatches) // self.num_updates
        shares: Shares = []
        for first in range(0, len(step.microbatches), size):
            part = step.microbatches[first : first + size]
            if self.by_microbatch:
                shares += [[s / size for s in self._of(m.rows)] for m in part]
            else:
                shares += _by_microbatch(self._of([r for m in part for r in m.rows]), part)
        return shares

    def _of(self, rows: list[Row] | tuple[Row, ...]) -> list[np.ndarray]:
        counts = [np.bincount(r.sample_index, minlength=len(r.sample_tokens)) for r in rows]
        num_samples = max(1, sum(int(np.count_nonzero(c)) for c in counts))
        match self.aggregation:
            case "token":
                total = max(1, sum(int(c.sum()) for c in counts))
                return [np.full(len(c), 1 / total, np.float32) for c in counts]
            case "sequence":
                return [(1 / (np.maximum(c, 1) * num_samples)).astype(np.float32) for c in counts]
            case "prompt":
                return _of_prompts(rows, counts)
            case "constant":
                return [np.full(len(c), 1 / (num_samples * self.length), np.float32) for c in counts]
        raise ValueError(f"loss.aggregation={self.aggregation} is unknown")


def _of_prompts(rows: list[Row] | tuple[Row, ...], counts: list[np.ndarray]) -> list[np.ndarray]:
    """A prompt's samples may lie in several rows: its tokens are counted over all of them."""
    groups, inverse = np.unique(np.concatenate([r.group_ids for r in rows]), return_inverse=True)
    totals = np.bincount(inverse, weights=np.concatenate(counts), minlength=len(groups))
    num_prompts = max(1, int(np.count_nonzero(totals)))
    shares = (1 / (np.maximum(totals, 1) * num_prompts))[inverse].astype(np.float32)
    return np.split(shares, np.cumsum([len(c) for c in counts])[:-1])


def _by_microbatch(flat: list[np.ndarray], part: tuple[Microbatch, ...]) -> Shares:
    taken = iter(flat)
    return [[next(taken) for _ in m.rows] for m in part]

"""Plans whole steps: samples are placed in order of arrival, a full microbatch closes, enough of them are a step.

Rows are planned as tries and become arrays only when their step is complete, so that samples which have become stale
can still leave. A microbatch closes only when no row has room, hence never with an empty row (PACK-18): an empty row
has room for every sample within the budget. Not thread safe: one thread calls it, or the caller holds a lock.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agrpo.errors import ContractError
from agrpo.packer.cost import Cost
from agrpo.packer.layout import lay_out
from agrpo.packer.trie import Node, Place, Trie
from agrpo.types import Microbatch, Row, Sample, Step

logger = logging.getLogger(__name__)


class Packer(Protocol):
    """What an option of this station offers: its settings' problems, and a planner that has them."""

    def problems(self, config: Any) -> list[str]: ...

    def planner(self, num_rows: int, token_budget: int, cost: Cost, microbatches_per_step: int) -> Planner: ...


class OpenRow:
    """A row that still takes samples; `num_tokens` are unique tokens, `num_terms` loss terms (PACK-12)."""

    def __init__(self, index: int, trie: Trie, token_budget: int, cost: Cost):
        self.index, self.trie, self.token_budget, self.cost = index, trie, token_budget, cost
        self.samples: list[Sample] = []
        self.leaves: list[Node] = []
        self.group_ids: set[int] = set()
        self.num_tokens = self.num_terms = self.depth_sum = 0

    @property
    def load(self) -> float:
        return self.cost.of(self.num_tokens, self.depth_sum)

    def fit(self, sample: Sample, num_terms: int) -> Fit | None:
        """What placing the sample here would mean, or None without room; changes nothing."""
        if self.num_terms + num_terms > self.token_budget:
            return None
        place = self.trie.find(sample.token_ids)
        length, shared = len(sample.token_ids), place.depth
        num_tokens = self.num_tokens + length - shared
        if num_tokens > self.token_budget:
            return None
        depth_sum = self.depth_sum + (length * (length + 1) - shared * (shared + 1)) // 2
        return Fit(self, place, num_tokens, self.num_terms + num_terms, depth_sum, self.cost.of(num_tokens, depth_sum))

    def take(self, sample: Sample, fit: Fit) -> None:
        """Place the sample as `fit` found."""
        self.leaves.append(self.trie.insert(sample.token_ids, fit.place))
        self.samples.append(sample)
        self.group_ids.add(sample.group_id)
        self.num_tokens, self.num_terms, self.depth_sum = fit.num_tokens, fit.num_terms, fit.depth_sum

    def lay_out(self, advantage_of: dict[int, float]) -> Row:
        """The row as arrays; `advantage_of` holds the advantages, by the sample's `id`, that replace the samples' own."""
        samples = self.samples
        if advantage_of:
            samples = [dataclasses.replace(s, advantage=float(advantage_of[id(s)])) for s in samples]
        return lay_out(self.trie, samples, self.leaves, self.load)


@dataclass(frozen=True, slots=True)
class Fit:
    """The row's figures after one more sample, computed once for the choice and used for the placement."""

    row: OpenRow
    place: Place
    num_tokens: int
    num_terms: int
    depth_sum: int
    load: float


class OpenMicrobatch:
    """One open row per process, and the samples in order of arrival."""

    def __init__(self, rows: list[OpenRow]):
        self.rows = rows
        self.samples: list[Sample] = []

    @property
    def is_full(self) -> bool:
        return all(row.samples for row in self.rows)

    def add(self, sample: Sample) -> bool:
        """Place the sample; false, and nothing changed, if the microbatch has to close before it."""
        fit = self._choose(sample)
        if fit is None:
            return False
        fit.row.take(sample, fit)
        self.samples.append(sample)
        return True

    def _choose(self, sample: Sample) -> Fit | None:
        """The row for the sample by PACK-15 to PACK-17; the least loaded first, ties to the lower index."""
        num_terms = sample.num_trained_tokens
        rows = sorted(self.rows, key=lambda row: row.load)
        homes = [row for row in rows if sample.group_id in row.group_ids]
        fit = next(_fits(homes, sample, num_terms), None)
        if fit is not None:
            return fit
        others = _fits((row for row in rows if sample.group_id not in row.group_ids), sample, num_terms)
        if not homes or not self.is_full:
            return next(others, None)
        # The heaviest row sets the time of the microbatch: below it there is room that costs nothing.
        heaviest = rows[-1].load
        return next((fit for fit in others if fit.load <= heaviest), None)


def _fits(rows: Iterable[OpenRow], sample: Sample, num_terms: int) -> Iterator[Fit]:
    return (fit for row in rows if (fit := row.fit(sample, num_terms)) is not None)


class Planner:
    """Samples in, steps out: `num_rows` rows per microbatch (one per process), `microbatches_per_step` per step."""

    def __init__(
        self, new_trie: Callable[[], Trie], num_rows: int, token_budget: int, cost: Cost, microbatches_per_step: int
    ):
        sizes = {"num_rows": num_rows, "token_budget": token_budget, "microbatches_per_step": microbatches_per_step}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.num_rows, self.token_budget, self.cost = num_rows, token_budget, cost
        self.microbatches_per_step = microbatches_per_step
        self.next_index = 1  # index of the next step; set by the caller on resume
        self.step_samples: list[Sample] = []  # samples of the step that was returned last, in order of arrival
        # Advantages [samples] of the samples of a step where they are known only now (ADV-13); None keeps their own.
        self.advantages: Callable[[list[Sample]], np.ndarray] | None = None
        self.dropped_oversize: list[Sample] = []  # samples longer than the budget (PACK-14); cleared by the caller
        self._new_trie = new_trie
        self._closed: list[OpenMicrobatch] = []
        self._open = self._open_microbatch()

    def add(self, sample: Sample) -> Step | None:
        """Place one sample; returns a step when this closed its last microbatch (the sample then opens the next)."""
        self._place(sample)
        return self.ready()

    def ready(self) -> Step | None:
        """The next step if all its microbatches are closed. After `rebuild` and `drop`, call until None."""
        if len(self._closed) < self.microbatches_per_step:
            return None
        chosen, self._closed = self._closed[: self.microbatches_per_step], self._closed[self.microbatches_per_step :]
        self.step_samples = [sample for microbatch in chosen for sample in microbatch.samples]
        advantage_of = {}
        if self.advantages is not None:
            advantage_of = dict(zip(map(id, self.step_samples), self.advantages(self.step_samples), strict=True))
        microbatches = tuple(Microbatch(tuple(row.lay_out(advantage_of) for row in m.rows)) for m in chosen)
        step = Step(index=self.next_index, microbatches=microbatches)
        self.next_index += 1
        return step

    def flush(self) -> Step | None:
        """End of the samples: close the open microbatch if it has no empty row, then as `ready`; call until None.

        What remains in `pending` afterwards makes no whole step and is discarded with the run (PACK-18, PACK-20).
        """
        if self._open.is_full:
            self._close()
        return self.ready()

    def pending(self) -> list[Sample]:
        """Samples accepted and not yet in a returned step, in order of arrival."""
        return [sample for microbatch in (*self._closed, self._open) for sample in microbatch.samples]

    def open_tokens(self) -> tuple[int, int]:
        """Raw and unique tokens of the open microbatch."""
        rows = self._open.rows
        return sum(len(s.token_ids) for row in rows for s in row.samples), sum(row.num_tokens for row in rows)

    def rebuild(self, samples: Iterable[Sample]) -> None:
        """Forget what is pending and place `samples` instead, in this order: a planner's own `pending` restores it."""
        self._closed, self._open = [], self._open_microbatch()
        for sample in samples:
            self._place(sample)

    def drop(self, is_dropped: Callable[[Sample], bool]) -> list[Sample]:
        """Remove and return the pending samples for which `is_dropped` holds; the others are placed again in order."""
        kept, dropped = [], []
        for sample in self.pending():
            (dropped if is_dropped(sample) else kept).append(sample)
        if dropped:
            self.rebuild(kept)
        return dropped

    def statistics(self, step: Step) -> dict[str, tuple[float, float]]:
        """The step's `batch/*` figures as (value, weight): numerator and denominator of ratios, sum and count of means."""
        rows = [row for microbatch in step.microbatches for row in microbatch.rows]
        num_rows, num_samples = len(rows), sum(len(r.sample_tokens) for r in rows)
        unique, raw = sum(r.num_tokens for r in rows), sum(int(r.sample_tokens.sum(dtype=np.int64)) for r in rows)
        trained, num_microbatches = step.num_trained_tokens, len(step.microbatches)
        return {
            "batch/forwarded_tokens_per_step": (unique, 1),
            "batch/trained_tokens_per_step": (trained, 1),
            "batch/samples_per_step": (num_samples, 1),
            "batch/groups_per_step": (len(np.unique(np.concatenate([r.group_ids for r in rows]))), 1),
            "batch/microbatches_per_step": (num_microbatches, 1),
            "batch/masked_token_frac": (raw - trained, raw),
            "batch/samples_per_row": (num_samples, num_rows),
            "batch/row_tokens_mean": (unique, num_rows),
            "batch/row_tokens_max": (max(r.num_tokens for r in rows), 1),
            "batch/row_fill_frac": (unique, num_rows * self.token_budget),
            "batch/row_imbalance": (sum(_imbalance(m) for m in step.microbatches), num_microbatches),
            "batch/packing_ratio": (raw, unique),
            "batch/pad_frac": (0, unique),  # rows travel at their own length
        }

    def _place(self, sample: Sample) -> None:
        length = len(sample.token_ids)
        if length == 0 or sample.loss_mask[0]:
            raise ContractError(
                f"group {sample.group_id}, rollout {sample.rollout_index}: a sample needs at least one token before its "
                f"first trained token, got {length} tokens, the first one {'trained' if length else 'missing'}"
            )
        if length > self.token_budget:
            logger.warning(
                "sample of %d tokens (group %d, rollout %d) dropped: longer than packer.token_budget %d",
                length, sample.group_id, sample.rollout_index, self.token_budget,
            )  # fmt: skip
            self.dropped_oversize.append(sample)
        elif not self._open.add(sample):
            self._close()
            self._open.add(sample)

    def _close(self) -> None:
        self._closed.append(self._open)
        self._open = self._open_microbatch()

    def _open_microbatch(self) -> OpenMicrobatch:
        indices = range(self.num_rows)
        return OpenMicrobatch([OpenRow(i, self._new_trie(), self.token_budget, self.cost) for i in indices])


def _imbalance(microbatch: Microbatch) -> float:
    """Attention cost of the heaviest row over the mean of the microbatch; 1.0 is balanced."""
    costs = [int(row.position_ids.sum(dtype=np.int64)) + row.num_tokens for row in microbatch.rows]
    return max(costs) * len(costs) / sum(costs)

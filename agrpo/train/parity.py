"""How far trainer and sampler disagree about the trained tokens, split by cause: engine, staleness, truncation.

A token sampled by the very weights that train it (age 0) can differ only because two engines computed it; what older
tokens differ by on top of that is staleness. Where the server cut the vocabulary without reporting its candidate sets,
its log-probs are too high by minus the log of the kept mass, which is known wherever the head covers the set.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from agrpo.errors import ServerError
from agrpo.metrics.window import Window

COVERED = 0.999  # sampler mass of the head from which the head is taken for the whole candidate set
_log = logging.getLogger(__name__)


class ParityProbe:
    """Accumulates on the device, reduced over all ranks once per record; `warn` and `stop` in nats, None = never."""

    def __init__(self, device: torch.device, *, is_truncated: bool, warn: float | None, stop: float | None):
        self._device, self._is_truncated = device, is_truncated
        self._warn, self._stop, self._has_warned = warn, stop, False
        self._sums = self._zeros()
        self._judged = (0.0, 0)  # engine gap and its number of tokens at the last record

    def _zeros(self) -> torch.Tensor:
        # sum and count of: engine gap at age 0, gap of older tokens, truncation
        return torch.zeros(6, device=self._device, dtype=torch.float64)

    @torch.no_grad()
    def add(self, terms: Any, version: int | None) -> None:
        """One microbatch; `version` is that of the weights that made `terms`, None after updates not sent yet."""
        if terms.trainer_logprobs.shape[0] == 0:
            return
        gap = (terms.trainer_logprobs.detach() - terms.sampler_logprobs).double()
        known = torch.ones_like(gap, dtype=torch.bool)
        cut = torch.zeros_like(gap)
        if self._is_truncated and terms.candidate_counts is None:
            cut, known = _log_kept_mass(terms)
            gap = gap - cut
        fresh = torch.zeros_like(known) if version is None else terms.versions >= version
        parts = [
            (gap.abs(), fresh & known),
            (gap.abs(), ~fresh & known),
            (-cut, known & (cut < 0)),
        ]
        self._sums += torch.stack([value for gaps, where in parts for value in ((gaps * where).sum(), where.sum())])

    def record(self, window: Window) -> None:
        """Add the split to `window` and start again; collective."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)
        engine, num_fresh, stale, num_stale, cut, num_cut = self._sums.tolist()
        self._sums = self._zeros()
        self._judged = (engine / max(num_fresh, 1), int(num_fresh))
        if num_fresh:
            window.add("parity/engine_gap", engine, num_fresh)
        if num_stale and num_fresh:
            window.add("parity/staleness_gap", max(0.0, stale / num_stale - engine / num_fresh))
        if num_cut:
            window.add("parity/truncation_gap", cut, num_cut)

    def judge(self, step_index: int) -> None:
        """Warn, or raise ServerError on all ranks alike, where the last record's engine gap is above a limit."""
        gap, num_tokens = self._judged
        text = (
            f"step {step_index}: trainer and server disagree by {gap:.3g} nats per token over {num_tokens} tokens that "
            "the current weights generated, so neither staleness nor the loss explains it; compare model.dtype, "
            "model.precision and server.dtype, and run: agrpo serve-check --probe, with this run's overrides"
        )
        if self._stop is not None and gap > self._stop:
            raise ServerError(f"{text} (limit run.parity_stop={self._stop:g}; null turns it off)")
        if self._warn is not None and gap > self._warn and not self._has_warned:
            self._has_warned = True  # once: the metric parity/engine_gap goes on
            _log.warning("%s (run.parity_warn=%g)", text, self._warn)


def _log_kept_mass(terms: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] log of the trainer's mass on the sampler's candidate set, and where the head holds that whole set."""
    sampler, trainer = terms.head_sampler_logprobs.double(), terms.head_trainer_logprobs.detach().double()
    if sampler.shape[1] == 0:
        none = torch.zeros(sampler.shape[0], dtype=torch.float64, device=sampler.device)
        return none, none.bool()
    is_listed = torch.isfinite(sampler)
    covered = sampler.exp().sum(1) >= COVERED
    mass = torch.logsumexp(trainer.masked_fill(~is_listed, -torch.inf), 1)
    # Two adds of rounding error may leave a mass of slightly more than one.
    return torch.where(covered, mass.clamp(max=0.0), 0.0), covered

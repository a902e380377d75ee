"""What the loss saw, accumulated on the device and reduced over all ranks once per record (LOG-9, LOG-10)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agrpo.metrics.window import Window

_SUMS = {
    "gap": "sampling/sampling_logp_difference/mean",
    "ratio": "sampling/importance_sampling_ratio/mean",
    "masked": "sampling/masked_mean",
    "sampler_mass": "sampling/sampler_mass",
    "tail_scale": "sampling/tail_scale_mean",
    "entropy": "entropy",
    "clipped_low": "clip_ratio/low_mean",
    "clipped_high": "clip_ratio/high_mean",
    "clipped": "clip_ratio/region_mean",
}
_MAXES = {
    "gap": "sampling/sampling_logp_difference/max",
    "ratio": "sampling/importance_sampling_ratio/max",
    "high_share": "clip_ratio/high_max",
}
_MINS = {"ratio": "sampling/importance_sampling_ratio/min", "low_share": "clip_ratio/low_min"}


class LossFigures:
    """Sums and extremes over all trained tokens since the last `record`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._loss = torch.zeros((), device=self._device)
        self._aux = torch.zeros(2, device=self._device, dtype=torch.float64)  # sum over rows, and how many had one
        self._count = torch.zeros((), device=self._device, dtype=torch.float64)
        self._sums = torch.zeros(len(_SUMS), device=self._device, dtype=torch.float64)
        self._maxes = torch.full((len(_MAXES),), -torch.inf, device=self._device)
        self._mins = torch.full((len(_MINS),), torch.inf, device=self._device)

    @torch.no_grad()
    def add(self, loss, terms, value: torch.Tensor) -> None:
        """One microbatch: its terms, and its share `value` of the step's loss, which is the mean of its updates'."""
        self._loss += value.detach()
        if terms.aux_loss is not None:
            self._aux += torch.stack([terms.aux_loss.detach().double(), torch.ones_like(self._aux[0])])
        num_terms = terms.trainer_logprobs.shape[0]
        if num_terms == 0:
            return
        figures = loss.statistics(terms)
        figures["gap"] = (terms.trainer_logprobs - terms.sampler_logprobs).abs()
        figures["entropy"] = terms.entropy
        figures["clipped"] = figures["clipped_low"] | figures["clipped_high"]
        figures["low_share"] = _share_per_sample(figures["clipped_low"], terms)
        figures["high_share"] = _share_per_sample(figures["clipped_high"], terms)
        absent = torch.full((1,), torch.nan, device=self._device)
        self._count += num_terms
        self._sums += torch.stack([figures.get(k, absent).double().sum() for k in _SUMS])
        self._maxes = self._maxes.maximum(torch.stack([figures[k].max() for k in _MAXES]))
        self._mins = self._mins.minimum(torch.stack([figures[k].min() for k in _MINS]))

    def record(self, window: Window, num_steps: int) -> None:
        """Add everything to `window` and start again; collective."""
        sums = torch.cat([self._loss.double()[None], self._aux, self._count[None], self._sums])
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(self._maxes, dist.ReduceOp.MAX)
            dist.all_reduce(self._mins, dist.ReduceOp.MIN)
        loss, aux, num_aux, count, *totals = sums.tolist()
        window.add("loss", loss, num_steps)
        if num_aux:
            window.add("aux_loss", aux, num_aux)
        if count:
            for name, total in zip(_SUMS.values(), totals, strict=True):
                window.add(name, total, count)
            for name, value in zip(_MAXES.values(), self._maxes.tolist(), strict=True):
                window.add(name, value)
            for name, value in zip(_MINS.values(), self._mins.tolist(), strict=True):
                window.add(name, value)
        self._reset()


def _share_per_sample(flags: torch.Tensor, terms) -> torch.Tensor:
    """[M] share of flagged tokens in each token's sample: flags [1 0 1] of samples [0 0 2] are [0.5 0.5 1]."""
    per_sample = torch.zeros(terms.num_samples, 2, device=flags.device)
    per_sample.index_add_(0, terms.sample_index, torch.stack([flags.float(), torch.ones_like(flags.float())], 1))
    flagged, counts = per_sample[terms.sample_index].unbind(1)
    return flagged / counts

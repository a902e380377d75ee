"""Metrics of the samples of a step (rows marked F); they count when the step is trained."""

from __future__ import annotations

import time

import numpy as np

from agrpo.metrics.window import Window
from agrpo.train.untrained import Untrained
from agrpo.types import ReadyGroup, Sample


def step_window(
    samples: list[Sample], groups: dict[int, ReadyGroup], ages: list[int], batch: dict[str, tuple[float, float]]
) -> Window:
    """`ages` are the samples' staleness, `groups` theirs by id, `batch` the planner's figures as (value, weight)."""
    window, count = Window(), len(samples)
    for name, (value, weight) in batch.items():
        window.add(name, value, weight)
    raw, trained = [len(s.token_ids) for s in samples], [s.num_trained_tokens for s in samples]
    window.add("sample/forwarded_tokens_mean", sum(raw), count)
    window.add("sample/forwarded_tokens_max", max(raw))
    window.add("sample/trained_tokens_mean", sum(trained), count)
    window.add("sample/staleness_mean", sum(ages), count)
    window.add("sample/staleness_max", max(ages))
    _add_rewards(window, samples, groups)
    _add_groups(window, samples, groups, trained)
    return window


def add_queue(window: Window, samples: list[Sample], untrained: Untrained) -> None:
    """The queue as the trainer takes a step of these samples, planned well before: how long they waited, what still waits."""
    now = time.time()
    waited = [max(0.0, now - untrained.group(s.group_id).ready_at) for s in samples]
    window.add("sample/time_in_queue_s", sum(waited), len(waited))
    window.add("rollout/queue_size", untrained.num_samples - len(samples))


def _add_rewards(window: Window, samples: list[Sample], groups: dict[int, ReadyGroup]) -> None:
    """Rewards and their spread within groups, averaged over trained samples."""
    slots = {g: dict(zip(group.rollout_indices.tolist(), group.rewards, strict=True)) for g, group in groups.items()}
    kept = [slots[s.group_id][s.rollout_index] for s in samples]
    # A rollout that no source scored is trained with advantage 0 and has no reward to enter a mean.
    window.add("reward_kept", float(np.nansum(kept)), int(np.count_nonzero(~np.isnan(kept))))
    _add_spread(window, "reward_group_std", samples, {g: _spread(group.rewards) for g, group in groups.items()})
    for name in {name for group in groups.values() for name in group.source_rewards}:
        spreads = {g: _spread(group.source_rewards.get(name)) for g, group in groups.items()}
        _add_spread(window, f"rewards/{name}/group_std", samples, spreads)


def _add_spread(window: Window, metric: str, samples: list[Sample], spreads: dict[int, float | None]) -> None:
    known = [spread for s in samples if (spread := spreads[s.group_id]) is not None]
    window.add(metric, sum(known), len(known))


def _spread(values: np.ndarray | None) -> float | None:
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanstd(values))


def _add_groups(window: Window, samples: list[Sample], groups: dict[int, ReadyGroup], trained: list[int]) -> None:
    sizes = {g: len(group.rewards) for g, group in groups.items()}
    window.add("group/usable_rollouts_mean", sum(sizes.values()), len(groups))
    window.add("group/usable_rows_mean", sum(len(g.samples) for g in groups.values()), len(groups))
    for size in set(sizes.values()):
        share = sum(n for s, n in zip(samples, trained, strict=True) if sizes[s.group_id] == size)
        window.add(f"group/loss_weight_size_{size}", share, sum(trained))

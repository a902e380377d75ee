"""What the rollout process measures, as events of a metrics window (MET, rows marked W; LOG-6)."""

from __future__ import annotations

import math
from typing import Any

from agrpo.env.stitch import chains_of, drift_tokens
from agrpo.types import Group, Rollout, Turn


def record_played(window: Any, group: Group, num_slots: int) -> None:
    """Lengths, turns, forks and failures of a group whose slots have all ended."""
    record_slots(window, group, num_slots)
    usable = group.usable
    for rollout in group.rollouts:
        for name, value, weight in rollout.measured:
            window.add(name, value, weight)
    failed = [r.failure for r in group.rollouts if r.failure is not None]
    window.add("rollout/failed_count", len(failed))
    for reason in failed:
        window.add(f"rollout/failed_{reason}_count", 1)
    if not usable:
        return
    _record_lengths(window, usable)
    window.add("rollout/duration_s", sum([r.duration_s for r in usable]), len(usable))
    num_turns = [len(r.turns) for r in usable]
    window.add("rollout/turns_mean", sum(num_turns), len(usable))
    window.add("rollout/turns_max", max(num_turns))
    _record_forks(window, usable)


def record_slots(window: Any, group: Group, num_slots: int) -> None:
    """How many of a group's slots ended usable (AREAL-WF-58)."""
    usable = group.usable
    window.add("group/target_slot_count", num_slots)
    window.add("group/usable_slot_count", len(usable))
    window.add("group/fully_masked_group", float(not usable))
    window.add("group/singleton_slot_group", float(len(usable) == 1))
    window.add("group/pre_filter_usable_slot_yield", len(usable), num_slots)


def _record_lengths(window: Any, usable: list[Rollout]) -> None:
    lengths = [len(r.turns[0].output_ids) if _is_plain(r) else sum(r.generated_counts) for r in usable]
    ended = [n for n, r in zip(lengths, usable, strict=True) if not r.truncated]
    for kind, values in (("", lengths), ("terminated_", ended)):
        if values:
            window.add(f"completions/mean_{kind}length", sum(values), len(values))
            window.add(f"completions/min_{kind}length", min(values))
            window.add(f"completions/max_{kind}length", max(values))
    window.add("rollout/generated_tokens_per_s", sum(lengths), 0)
    window.add("completions/clipped_ratio", len(lengths) - len(ended), len(lengths))
    distinct = {_generated(r.turns[0]) if len(r.turns) == 1 else tuple(map(_generated, r.turns)) for r in usable}
    window.add("completions/duplicate_frac", len(usable) - len(distinct), len(usable))


def _generated(turn: Turn) -> bytes:
    return turn.output_ids.tobytes()


def _is_plain(rollout: Rollout) -> bool:
    """One turn and nothing else, as most rollouts are; their figures need no walk over turns."""
    return len(rollout.turns) == 1 and rollout.row_offsets is None


def _is_trained(turn: Turn) -> bool:
    """Any token of it; by the bytes of the mask, which for a short one is a tenth of the time of numpy's `any`."""
    return b"\x01" in turn.output_mask.tobytes()


def _record_forks(window: Any, usable: list[Rollout]) -> None:
    num_samples = sum(
        [_is_trained(r.turns[0]) if _is_plain(r) else sum(any(map(_is_trained, c)) for c in chains_of(r)) for r in usable]
    )
    window.add("rollout/samples_per_rollout", num_samples, len(usable))
    joined = [r for r in usable if r.row_offsets is None and len(r.turns) > 1]  # separate rows are no forks
    drifts = [d for r in joined for d in drift_tokens(r.turns)]
    if drifts:
        forks = sum(len(chains_of(r)) - 1 for r in joined)
        window.add("rollout/fork_frac", forks, len(drifts))
        window.add("rollout/drift_tokens_mean", sum(drifts), len(drifts))
        window.add("rollout/drift_tokens_max", max(drifts))


def record_scored(window: Any, group: Group, has_signal: bool, dropped: bool) -> None:
    """Rewards of a scored group; `has_signal` = at least two scored rewards that differ."""
    usable = group.usable
    for name in {name: None for r in usable for name in r.rewards}:
        values = [value for value in [r.rewards.get(name) for r in usable] if value is not None]
        if values:
            window.add(f"rewards/{name}/mean", sum(values), len(values))
    scored = [reward for reward in [r.reward for r in usable] if not math.isnan(reward)]
    window.add("frac_reward_zero_std", float(not has_signal), 1)
    if scored:
        window.add("reward", sum(scored), len(scored))
        if dropped:
            window.add("reward_dropped", sum(scored), len(scored))


def record_trainable(window: Any, num_trainable: int, num_slots: int) -> None:
    """`num_trainable` slots of a group passed the size rules; 0 for a group they dropped."""
    window.add("group/trainable_slot_count", num_trainable)
    window.add("group/pre_filter_trainable_slot_yield", num_trainable, num_slots)


def record_load(window: Any, load: Any, num_preempted: float) -> None:
    """One look at the server outside of weight syncs."""
    window.add("rollout/vllm_kv_cache_usage_frac", load.kv_cache_usage)
    window.add("rollout/vllm_running_requests", load.num_running)
    window.add("rollout/vllm_queued_requests", load.num_waiting)
    window.add("rollout/vllm_preemption_count", num_preempted)

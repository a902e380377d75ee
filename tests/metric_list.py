"""The metrics that a run must log, independent of the code's own table: name, unit, who measures it, reduction, when.

`when` is what a run needs for the metric: empty = every run that took a step; else a kind of run, or `event` for what
is logged only once something happens (LOG-5). `event` and `gpu` are caused part by part in tests/metrics/test_metrics_events.py, `moe` is
logged by a step in tests/model/test_model_moe.py; the other kinds by whole runs.
"""

from __future__ import annotations

import re

from agrpo.metrics.names import declared

REQUIRED = """
num_tokens | tokens | T | last
epoch | passes | T | last
completions/mean_length | tokens | W | ratio
completions/min_length | tokens | W | min
completions/max_length | tokens | W | max
completions/mean_terminated_length | tokens | W | ratio
completions/min_terminated_length | tokens | W | min
completions/max_terminated_length | tokens | W | max
completions/clipped_ratio | 0..1 | W | ratio
completions/duplicate_frac | 0..1 | W | ratio
tools/call_frequency | calls per rollout | W | ratio
tools/failure_frequency | 0..1 | W | ratio
rewards/{name}/mean | reward | W | ratio
rewards/{name}/group_std | reward | F | ratio
rewards/{name}/call_s | s | W | ratio
reward | reward | W | ratio
reward_group_std | reward | F | ratio
reward_kept | reward | F | ratio
reward_dropped | reward | W | ratio
frac_reward_zero_std | 0..1 | W | ratio
sampling/sampling_logp_difference/mean | nats | L | ratio
sampling/sampling_logp_difference/max | nats | L | max
sampling/importance_sampling_ratio/min | ratio | L | min
sampling/importance_sampling_ratio/mean | ratio | L | ratio
sampling/importance_sampling_ratio/max | ratio | L | max
sampling/masked_mean | 0..1 | L | ratio
sampling/sampler_mass | 0..1 | L | ratio
sampling/tail_scale_mean | ratio | L | ratio
entropy | nats | L | ratio
aux_loss | loss | L | mean
clip_ratio/low_mean | 0..1 | L | ratio
clip_ratio/low_min | 0..1 | L | min
clip_ratio/high_mean | 0..1 | L | ratio
clip_ratio/high_max | 0..1 | L | max
clip_ratio/region_mean | 0..1 | L | ratio
rollout/duration_s | s | W | ratio
rollout/generated_tokens_per_s | tokens/s | W | ratio
rollout/concurrency | rollouts | W | mean
rollout/concurrency_cap | rollouts | W | mean
rollout/turns_mean | turns | W | ratio
rollout/turns_max | turns | W | max
rollout/samples_per_rollout | samples | W | ratio
rollout/fork_frac | 0..1 | W | ratio
rollout/drift_tokens_mean | tokens | W | ratio
rollout/drift_tokens_max | tokens | W | max
rollout/score_queue_size | groups | W | mean
rollout/queue_size | samples | F | mean
rollout/score_s | s | W | ratio
rollout/score_wait_s | s | W | ratio
rollout/score_block_s | s | W | mean
rollout/backpressure_s | s | W | ratio
rollout/vllm_retry_count | count | W | sum
rollout/vllm_kv_cache_usage_frac | 0..1 | W | mean
rollout/vllm_running_requests | requests | W | mean
rollout/vllm_queued_requests | requests | W | mean
rollout/vllm_preemption_count | count | W | sum
rollout/failed_count | count | W | sum
rollout/skipped_prompt_count | count | W | sum
tools/latency_s | s | W | ratio
tools/{tool}/latency_s | s | W | ratio
tools/{tool}/call_count | count | W | sum
tools/{tool}/failure_count | count | W | sum
tools/unknown_name_count | count | W | sum
tools/parallel_calls_mean | calls | W | ratio
tools/loop_exhausted_frac | 0..1 | W | ratio
env/reset_s | s | W | ratio
env/reward_s | s | W | ratio
sample/forwarded_tokens_mean | tokens | F | ratio
sample/forwarded_tokens_max | tokens | F | max
sample/trained_tokens_mean | tokens | F | ratio
sample/time_in_queue_s | s | F | ratio
sample/staleness_mean | versions | F | ratio
sample/staleness_max | versions | F | max
sample/dropped_stale_count | count | F | sum
batch/forwarded_tokens_per_step | tokens | T | mean
batch/trained_tokens_per_step | tokens | T | mean
batch/samples_per_step | samples | T | mean
batch/groups_per_step | groups | T | mean
batch/microbatches_per_step | count | T | mean
batch/masked_token_frac | 0..1 | F | ratio
batch/samples_per_row | samples | F | ratio
batch/row_tokens_mean | tokens | F | ratio
batch/row_tokens_max | tokens | F | max
batch/row_fill_frac | 0..1 | F | ratio
batch/row_imbalance | ratio | F | mean
batch/packing_ratio | ratio | F | ratio
batch/pad_frac | 0..1 | F | ratio
batch/dropped_oversize_count | count | F | sum
perf/step_s | s | T | mean
perf/fwd_bwd_s | s | T | mean
perf/fwd_s | s | T | mean
perf/optimizer_s | s | T | mean
perf/rollout_wait_s | s | T | mean
perf/weight_sync_s | s | T | mean
perf/weight_sync_pause_s | s | T | mean
perf/weight_sync_barrier_s | s | T | mean
perf/weight_sync_transfer_s | s | T | mean
perf/fwd_bwd_forwarded_tokens_per_s | tokens/s | T | ratio
perf/wall_clock_forwarded_tokens_per_s | tokens/s | T | ratio
perf/wall_clock_trained_tokens_per_s | tokens/s | T | ratio
perf/fwd_bwd_mfu | 0..1 | T | ratio
perf/wall_clock_mfu | 0..1 | T | ratio
perf/metrics_dropped_count | count | W | sum
group/target_slot_count | count | W | sum
group/usable_slot_count | count | W | sum
group/trainable_slot_count | count | W | sum
group/fully_masked_group | 0..1 | W | mean
group/singleton_slot_group | 0..1 | W | mean
group/pre_filter_usable_slot_yield | 0..1 | W | ratio
group/pre_filter_trainable_slot_yield | 0..1 | W | ratio
group/accepted_count | count | W | sum
group/rejected_count | count | W | sum
group/usable_rollouts_mean | rollouts | F | ratio
group/usable_rows_mean | rows | F | ratio
group/loss_weight_size_{N} | 0..1 | F | ratio
loss | loss | L | mean
grad_norm | norm | T | mean
learning_rate | rate | T | last
rollout/failed_{reason}_count | count | W | sum
tokens/generated | tokens | W | sum
tokens/sent | tokens | W | sum
tokens/trained | tokens | F | sum
tokens/discarded/{reason} | tokens | W | sum
tokens/in_flight | tokens | W | last
tokens/untrained | tokens | F | last
perf/weight_sync_version | version | T | last
perf/weight_sync_parity | nats | T | max
eval/{name}/reward | reward | W | last
eval/{name}/version | version | W | last
eval/{name}/duration_s | s | W | last
"""

WHEN = {
    "gpu": ("perf/fwd_bwd_mfu", "perf/wall_clock_mfu"),
    "moe": ("aux_loss",),
    "centering": ("sampling/sampler_mass",),
    "tail": ("sampling/tail_scale_mean",),
    "eval": ("eval/{name}/reward", "eval/{name}/version", "eval/{name}/duration_s"),
    "terminated": (
        "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    ),
    "accept": ("group/accepted_count",),
    "tools": (
        "tools/call_frequency", "tools/failure_frequency", "tools/latency_s", "tools/{tool}/latency_s", "tools/{tool}/call_count",
        "tools/{tool}/failure_count", "tools/parallel_calls_mean", "tools/loop_exhausted_frac", "rollout/fork_frac",
        "rollout/drift_tokens_mean", "rollout/drift_tokens_max",
    ),
    "environment": ("env/reset_s", "env/reward_s"),
    "event": (
        "reward_dropped", "rollout/vllm_retry_count", "rollout/failed_{reason}_count", "rollout/skipped_prompt_count",
        "tools/unknown_name_count", "sample/dropped_stale_count", "batch/dropped_oversize_count", "group/rejected_count",
        "group/accepted_count", "tokens/discarded/{reason}", "rollout/backpressure_s", "rollout/vllm_kv_cache_usage_frac",
        "rollout/vllm_running_requests", "rollout/vllm_queued_requests", "rollout/vllm_preemption_count",
    ),
}  # fmt: skip


def required() -> dict[str, tuple[str, str, str]]:
    """Name -> unit, by, reduction."""
    rows = (tuple(part.strip() for part in line.split(" | ")) for line in REQUIRED.strip().splitlines())
    return {name: (unit, by, reduction) for name, unit, by, reduction in rows}


def when(name: str) -> set[str]:
    """The kinds of run of which each suffices; empty = any."""
    return {kind for kind, names in WHEN.items() if name in names}


def absent(records: list[dict], *kinds: str) -> list[str]:
    """Required metrics that a run of these kinds did not log."""
    logged = {declared(name).name for record in records for name in record if declared(name) is not None}
    return [name for name in required() if name not in logged and (not when(name) or when(name) & set(kinds))]


def unlogged(records: list[dict], kind: str) -> list[str]:
    """Metrics of this kind that none of the records has."""
    logged = {declared(name).name for record in records for name in record if declared(name) is not None}
    return [name for name in WHEN[kind] if name not in logged]


def outside(records: list[dict]) -> list[tuple[int, str, object]]:
    """Values that their unit or reduction does not allow: step, name, value."""
    return [
        (record["step"], name, value)
        for record in records
        for name, value in record.items()
        if name != "step" and value is not None and not _fits(declared(name), value)
    ]


def _fits(metric, value) -> bool:
    if metric.unit == "verdict":
        return isinstance(value, str)
    if not isinstance(value, int | float) or value != value:
        return False
    if metric.unit == "0..1":
        return -1e-9 <= value <= 1 + 1e-9
    is_whole = metric.reduction in ("sum", "max", "min", "last") and "mean" not in metric.name
    if is_whole and metric.unit in ("count", "version", "rollouts", "tokens"):
        return value >= 0 and float(value).is_integer()
    if metric.unit in ("s", "tokens/s", "tokens", "count", "turns", "samples", "groups", "requests", "versions", "rows"):
        return value >= 0
    return not re.fullmatch("ratio|norm|rate|passes", metric.unit) or value >= 0

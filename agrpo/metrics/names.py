"""Every metric, declared once: name, unit, who measures it, how a window of events becomes one number, and its meaning.

A name may hold one placeholder (`rewards/{name}/mean`). *By*: W rollout process, F feeder on rank 0, L loss on all
ranks, T training loop. *Window*: ratio = sum of numerators over sum of denominators of all events; sum, max, min; mean
of the recorded values; last. Names outside this table (a user's own) follow the rule of their last word (LOG-3).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

REDUCTIONS = ("ratio", "sum", "max", "min", "mean", "last")


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric; `section` is its heading in the documentation."""

    name: str
    unit: str
    by: str
    reduction: str
    meaning: str
    section: str

    @property
    def is_nan_when_empty(self) -> bool:
        """True where events with nothing to divide by are logged as NaN instead of being left out (LOG-5)."""
        return "NaN in a window without" in self.meaning


@functools.cache
def metrics() -> tuple[Metric, ...]:
    """All declared metrics in the order of the table."""
    section, found = "", []
    for line in TABLE.strip().splitlines():
        if line.startswith("# "):
            section = line[2:]
            continue
        name, unit, by, reduction, meaning = (part.strip() for part in line.split(" | "))
        found.append(Metric(name, unit, by, reduction, meaning, section))
    return tuple(found)


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern, Metric], ...]:
    placeholders = [m for m in metrics() if "{" in m.name]
    return tuple((re.compile(re.sub(r"\\{\w+\\}", "(.+)", re.escape(m.name))), m) for m in placeholders)


@functools.cache
def _exact() -> dict[str, Metric]:
    return {m.name: m for m in metrics() if "{" not in m.name}


@functools.lru_cache(maxsize=4096)
def declared(name: str) -> Metric | None:
    """The declaration of a metric, placeholders filled in: `rewards/max_len/mean` is `rewards/{name}/mean`."""
    if name in _exact():
        return _exact()[name]
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def undeclared(names: Iterable[str]) -> list[str]:
    """The names that no row of the table covers; `step` is the record's own key."""
    return [name for name in names if name != "step" and declared(name) is None]


@functools.lru_cache(maxsize=4096)
def reduction_of(name: str) -> str:
    """The declared reduction; else by the words of the last path part: count, max, min, otherwise mean (LOG-3)."""
    metric = declared(name)
    if metric is not None:
        return metric.reduction
    words = name.rsplit("/", 1)[-1].split("_")
    return next((rule for word, rule in (("count", "sum"), ("max", "max"), ("min", "min")) if word in words), "mean")


@functools.lru_cache(maxsize=1)
def positions() -> dict[str, int]:
    """Declared name -> place in the table, so that a record lists its metrics in a stable order."""
    return {m.name: i for i, m in enumerate(metrics())}


def table_markdown() -> str:
    """The table of all metrics for the documentation."""
    lines, section = [], None
    for m in metrics():
        if m.section != section:
            section = m.section
            lines += ["", f"### {section}", "", "| metric | unit | by | window | meaning |", "|---|---|---|---|---|"]
        lines.append(f"| `{m.name}` | {m.unit} | {m.by} | {m.reduction} | {m.meaning} |")
    return "\n".join(lines[1:]) + "\n"


TABLE = """
# General, completions, rewards, loss
num_tokens | tokens | T | last | unique tokens forwarded since the start of training, all processes; kept over a resume
loss | loss | L | mean | value of the objective, the sum over a step divided by its trained tokens; of several updates their mean
grad_norm | norm | T | mean | gradient norm over all processes, before clipping
learning_rate | rate | T | last | learning rate of the step
epoch | passes | T | last | prompts resolved / prompts of the data set
completions/mean_length | tokens | W | ratio | generated tokens per rollout, tool and template tokens excluded
completions/min_length | tokens | W | min | smallest such length
completions/max_length | tokens | W | max | largest such length
completions/mean_terminated_length | tokens | W | ratio | as mean_length over terminated rollouts only
completions/min_terminated_length | tokens | W | min | smallest length of a terminated rollout
completions/max_terminated_length | tokens | W | max | largest length of a terminated rollout
completions/clipped_ratio | 0..1 | W | ratio | rollouts whose last turn does not end in EOS / rollouts
completions/duplicate_frac | 0..1 | W | ratio | rollouts equal to an earlier one of their group / rollouts; 8 equal: 7/8
tools/call_frequency | calls per rollout | W | ratio | tool calls / rollouts; only with tools or environments
tools/failure_frequency | 0..1 | W | ratio | failed tool calls / calls; NaN in a window without calls
rewards/{name}/mean | reward | W | ratio | mean of the values source `name` gave; environments under their class name
rewards/{name}/group_std | reward | F | ratio | std of source `name` in each group, mean over trained samples
rewards/{name}/call_s | s | W | ratio | time inside source `name` for one group; functions of the scorer only
reward | reward | W | ratio | mean summed reward over all scored rollouts: the figure that describes the policy
reward_group_std | reward | F | ratio | std of the summed reward in each group, mean over trained samples
reward_kept | reward | F | ratio | mean summed reward over trained samples
reward_dropped | reward | W | ratio | mean summed reward of groups dropped as zero-std or under-scored
frac_reward_zero_std | 0..1 | W | ratio | groups with equal rewards or fewer than two scored rollouts / groups scored
sampling/sampling_logp_difference/mean | nats | L | ratio | mean abs(log p - log q) over trained tokens
sampling/sampling_logp_difference/max | nats | L | max | largest such difference
sampling/importance_sampling_ratio/min | ratio | L | min | smallest p / q over trained tokens, before masking
sampling/importance_sampling_ratio/mean | ratio | L | ratio | mean p / q over trained tokens, before masking
sampling/importance_sampling_ratio/max | ratio | L | max | largest p / q over trained tokens, before masking
sampling/masked_mean | 0..1 | L | ratio | trained tokens with p / q outside [clip_min, clip_max] / trained tokens
sampling/sampler_mass | 0..1 | L | ratio | mean sampler mass on the head tokens; only with centering
sampling/tail_scale_mean | ratio | L | ratio | mean factor of the tail beyond the head; only with the tail model
parity/engine_gap | nats | L | ratio | mean abs(log p - log q) of tokens that the current weights generated: the engines'
parity/staleness_gap | nats | L | mean | what tokens of older weights differ by on top of parity/engine_gap
parity/truncation_gap | nats | L | ratio | mean -log of the mass kept by top-k, top-p, min-p where no candidate set is known
entropy | nats | L | ratio | mean entropy at trained positions
aux_loss | loss | L | mean | auxiliary loss before its coefficient, mean over processes; mixture of experts only
clip_ratio/low_mean | 0..1 | L | ratio | share of tokens: p / q < 1 - epsilon and A < 0 (with centering: any A)
clip_ratio/low_min | 0..1 | L | min | smallest share of such tokens in one completion
clip_ratio/high_mean | 0..1 | L | ratio | share of tokens: p / q > 1 + epsilon_high and A > 0 (with centering: any A)
clip_ratio/high_max | 0..1 | L | max | largest share of such tokens in one completion
clip_ratio/region_mean | 0..1 | L | ratio | tokens counted low or high / trained tokens
# Rollouts
rollout/duration_s | s | W | ratio | wall time of a rollout from dispatch until it is collected
rollout/generated_tokens_per_s | tokens/s | W | ratio | generated tokens / seconds since the previous report
rollout/concurrency | rollouts | W | mean | rollouts in flight, sampled at least every 5 s
rollout/concurrency_cap | rollouts | W | mean | live cap at the same moments
rollout/turns_mean | turns | W | ratio | turns per rollout
rollout/turns_max | turns | W | max | most turns of one rollout
rollout/samples_per_rollout | samples | W | ratio | samples per rollout; above 1: forks, below 1: some gave none
rollout/fork_frac | 0..1 | W | ratio | turn transitions that opened a new sample / transitions
rollout/drift_tokens_mean | tokens | W | ratio | held tokens rendered again after a fork, per transition
rollout/drift_tokens_max | tokens | W | max | largest such number
rollout/score_queue_size | groups | W | mean | finished groups waiting for scoring
rollout/queue_size | samples | F | mean | samples waiting for the trainer when it takes a step, those of the step left out
rollout/score_s | s | W | ratio | time to score one group
rollout/score_wait_s | s | W | ratio | time a finished group waited before scoring began
rollout/score_block_s | s | W | mean | time generation was blocked by a full score queue
rollout/backpressure_s | s | W | ratio | duration of a wait for admission, mean over waits
rollout/backpressure_s_per_step | s | T | mean | seconds of a step in which no group could be admitted
rollout/vllm_retry_count | count | W | sum | retried requests
rollout/vllm_kv_cache_usage_frac | 0..1 | W | mean | KV-cache usage, maximum over engines, polls outside syncs
rollout/vllm_running_requests | requests | W | mean | requests being decoded, all engines
rollout/vllm_queued_requests | requests | W | mean | requests accepted but not scheduled, all engines
rollout/vllm_preemption_count | count | W | sum | preempted requests, all engines; syncs with cache reset raise it
rollout/failed_count | count | W | sum | rollouts unusable by errors
rollout/failed_{reason}_count | count | W | sum | rollouts unusable by errors, per reason
rollout/skipped_prompt_count | count | W | sum | groups skipped for a too long prompt or by filter_prompt
# Tools and environments
tools/latency_s | s | W | ratio | duration of a tool call over all tools
tools/{tool}/latency_s | s | W | ratio | the same for one tool
tools/{tool}/call_count | count | W | sum | calls of one tool
tools/{tool}/failure_count | count | W | sum | failed calls of one tool
tools/unknown_name_count | count | W | sum | calls of a name that does not exist
tools/parallel_calls_mean | calls | W | ratio | calls per assistant message that contains a call
tools/loop_exhausted_frac | 0..1 | W | ratio | rollouts stopped by the iteration limit while still calling / rollouts
env/reset_s | s | W | ratio | duration of reset; only with an environment
env/reward_s | s | W | ratio | duration of get_reward; only if defined
# Samples and batches
sample/forwarded_tokens_mean | tokens | F | ratio | raw tokens per sample
sample/forwarded_tokens_max | tokens | F | max | longest sample
sample/trained_tokens_mean | tokens | F | ratio | trained tokens per sample
sample/time_in_queue_s | s | F | ratio | time from a sample's arrival in the queue until its step is taken
sample/staleness_mean | versions | F | ratio | staleness of pulled samples that are kept
sample/staleness_max | versions | F | max | largest such staleness
sample/dropped_stale_count | count | F | sum | samples dropped for staleness since the last record
batch/forwarded_tokens_per_step | tokens | T | mean | unique tokens forwarded in a step, all processes
batch/trained_tokens_per_step | tokens | T | mean | trained tokens in a step, all processes
batch/samples_per_step | samples | T | mean | samples in a step
batch/groups_per_step | groups | T | mean | distinct groups in a step
batch/microbatches_per_step | count | T | mean | microbatches of a step
batch/masked_token_frac | 0..1 | F | ratio | (raw - trained tokens) / raw tokens
batch/samples_per_row | samples | F | ratio | samples per row
batch/row_tokens_mean | tokens | F | ratio | unique tokens per row
batch/row_tokens_max | tokens | F | max | unique tokens of the longest row
batch/row_fill_frac | 0..1 | F | ratio | unique tokens / (rows * packer.token_budget)
batch/row_imbalance | ratio | F | mean | attention cost of the heaviest row / mean of its microbatch; 1.0 is balanced
batch/packing_ratio | ratio | F | ratio | raw tokens / unique tokens; 1.0 without sharing
batch/pad_frac | 0..1 | F | ratio | transport padding / (padding + unique tokens)
batch/dropped_oversize_count | count | F | sum | samples longer than the token budget
# Generated tokens, by what became of them
tokens/generated | tokens | W | sum | tokens of the servers' answers to rollouts for training; summed over records = in flight + discarded + sent
tokens/sent | tokens | W | sum | of these, tokens to train that were handed to the trainer; summed = trained + discarded by the trainer + untrained
tokens/trained | tokens | F | sum | of these, tokens that a step has trained
tokens/discarded/{reason} | tokens | W | sum | of these, tokens discarded for a reason, `unused` = in no trained position
tokens/in_flight | tokens | W | last | of these, tokens of groups that are still generated or scored
tokens/untrained | tokens | F | last | of these, tokens that wait for a step
# Performance
perf/step_s | s | T | mean | wall time from the end of the previous step to the end of this one
perf/fwd_bwd_s | s | T | mean | forward and backward time of a step, measured on the device
perf/fwd_s | s | T | mean | forward part alone, measured on the device
perf/optimizer_s | s | T | mean | optimizer update
perf/rollout_wait_s | s | T | mean | time of a step in which training waited on an empty sample queue
perf/weight_sync_s | s | T | mean | complete sync, per sync
perf/weight_sync_pause_s | s | T | mean | part spent waiting for the server's pause
perf/weight_sync_barrier_s | s | T | mean | part spent waiting for other processes
perf/weight_sync_transfer_s | s | T | mean | part spent sending
perf/weight_sync_version | version | T | last | version of the weights the server holds
server/restart_count | restarts | T | sum | servers that were started again and got the weights anew
perf/weight_sync_parity | nats | T | max | mean abs(trainer - server log-prob) of the proof that weights arrived
perf/fwd_bwd_forwarded_tokens_per_s | tokens/s | T | ratio | unique forwarded tokens / forward and backward seconds
perf/wall_clock_forwarded_tokens_per_s | tokens/s | T | ratio | unique forwarded tokens / step seconds
perf/wall_clock_trained_tokens_per_s | tokens/s | T | ratio | trained tokens / step seconds
perf/fwd_bwd_mfu | 0..1 | T | ratio | model FLOPs of forward and backward / (seconds * devices * peak), where the peak is known
perf/wall_clock_mfu | 0..1 | T | ratio | the same over whole steps
perf/fwd_bwd_hfu | 0..1 | T | ratio | as fwd_bwd_mfu, with the activations and logits that backward computes again
perf/model_tflops_per_s | TFLOP/s | T | ratio | model FLOPs of forward and backward / seconds, all devices; known architectures only
perf/metrics_dropped_count | count | W | sum | metric records discarded by a full channel
# Grouped rollouts
group/target_slot_count | count | W | sum | slots started (G per group)
group/usable_slot_count | count | W | sum | slots with a usable result
group/trainable_slot_count | count | W | sum | usable slots of groups that pass the size rules
group/fully_masked_group | 0..1 | W | mean | 1 for a group without any usable slot
group/singleton_slot_group | 0..1 | W | mean | 1 for a group with exactly one usable slot
group/pre_filter_usable_slot_yield | 0..1 | W | ratio | usable / target slots, before rollout.accept_fn
group/pre_filter_trainable_slot_yield | 0..1 | W | ratio | trainable / target slots, before rollout.accept_fn
group/accepted_count | count | W | sum | groups accepted by rollout.accept_fn
group/rejected_count | count | W | sum | groups rejected by it or without result
group/usable_rollouts_mean | rollouts | F | ratio | logical rollouts per trained group
group/usable_rows_mean | rows | F | ratio | rows (samples) per trained group
group/loss_weight_size_{N} | 0..1 | F | ratio | share of trained tokens in groups with N usable rollouts
# Evaluation
eval/{name}/reward | reward | W | last | mean over prompts of their mean summed reward; all answers come from one version
eval/{name}/reward_ci95 | reward | W | last | half the width of its 95 % interval: 1.96 standard errors over prompts
eval/{name}/pass_at_{k} | 0..1 | W | last | pass@k, unbiased, mean over prompts
eval/{name}/version | version | W | last | weight version that answered
eval/{name}/step | step | T | last | optimizer step that made these weights
eval/{name}/rollouts_count | count | W | last | rollouts scored
eval/{name}/prompts_count | count | W | last | prompts with a scored rollout
eval/{name}/failed_count | count | W | last | rollouts unusable by errors
eval/{name}/mean_length | tokens | W | last | generated tokens per rollout
eval/{name}/clipped_ratio | 0..1 | W | last | rollouts that did not end in EOS / rollouts
eval/{name}/duration_s | s | W | last | wall time of one evaluation
eval/{name}/given_up_count | count | T | sum | evaluations without result: the weights changed before they were through
perf/held_sync_count | syncs | T | sum | weight syncs left out for an evaluation
# Reading
diag/bottleneck | verdict | T | last | balanced, generation-bound, trainer-bound or window-bound
diag/concurrency_limit | verdict | T | last | staleness, server, max_concurrent_rollouts or none
"""

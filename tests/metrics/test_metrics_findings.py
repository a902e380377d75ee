"""Every rule of the diagnosis on hand-made records, at both sides of its threshold."""

import numpy as np
import pytest

from agrpo.config.runner import compose_tree
from agrpo.metrics.findings import changes, findings, share
from agrpo.metrics.history import History

SETTINGS = {
    "rollout": {"group_size": 8, "max_concurrent_rollouts": 64, "max_staleness": 4},
    "run": {"num_processes": 2, "parity_warn": 0.1},
    "scorer": {"reward_range": [0.0, 1.0], "max_concurrent_groups": 8},
    "sampler": {"max_completion_length": 100, "num_sampler_logprobs": 8},
    "packer": {"token_budget": 1024},
    "optimizer": {"learning_rate": 3e-4, "max_grad_norm": 1.0},
    "sync": {"every_steps": 1},
}
ON_GPUS = {**SETTINGS, "run": {**SETTINGS["run"], "devices": {"server": [0], "trainer": [1, 2]}}}
HEALTHY = {
    "reward": 0.6, "reward_dropped": 0.5, "frac_reward_zero_std": 0.2, "perf/step_s": 10.0, "perf/rollout_wait_s": 0.5,
    "rollout/backpressure_s_per_step": 0.5, "perf/weight_sync_s": 0.5, "completions/clipped_ratio": 0.0,
    "completions/duplicate_frac": 0.1, "entropy": 1.0, "rewards/right/group_std": 0.4,
}  # fmt: skip


def records(num=12, **changed):
    """Equal records but for `changed`, a number or a function of the record's number from 0."""
    changed = {k.replace("__", "/"): v for k, v in changed.items()}
    return [
        {"step": i + 1, **HEALTHY, **{k: v(i) if callable(v) else v for k, v in changed.items()}} for i in range(num)
    ]


def found(num=12, settings=None, **changed):
    return {f.rule: f for f in findings(records(num, **changed), settings or SETTINGS)}


def ramp(first, last, num=12):
    """The last 10 of `num` records go from `first` to `last` in a straight line."""
    return lambda i: first + (last - first) * max(i - (num - 10), 0) / 9


def at_the_ends(first, last, num=12):
    """Only the first and the last of `num` records have it."""
    return lambda i: {0: first, num - 1: last}.get(i)


def test_a_healthy_run_needs_nothing():
    assert {name: f.level for name, f in found().items()} == {"healthy": "fine", "balanced": "fine"}


def test_no_record_gives_no_verdict():
    assert findings([], SETTINGS) == []


BOTH_SIDES = [
    # rule, inside, outside
    ("generation-bound", {"perf__rollout_wait_s": 1.0}, {"perf__rollout_wait_s": 0.99}),
    ("trainer-bound", {"rollout__backpressure_s_per_step": 1.0}, {"rollout__backpressure_s_per_step": 0.99}),
    ("window-bound", {"perf__rollout_wait_s": 1.0, "rollout__backpressure_s_per_step": 1.0},
     {"perf__rollout_wait_s": 1.0, "rollout__backpressure_s_per_step": 0.99}),
    ("too-few-places",
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 61, "rollout__concurrency_cap": 64, "rollout__vllm_kv_cache_usage_frac": 0.59},
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 60, "rollout__concurrency_cap": 64, "rollout__vllm_kv_cache_usage_frac": 0.59}),
    ("too-few-places",
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 64, "rollout__concurrency_cap": 64, "rollout__vllm_kv_cache_usage_frac": 0.59},
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 64, "rollout__concurrency_cap": 64, "rollout__vllm_kv_cache_usage_frac": 0.60}),
    ("server-full", {"perf__rollout_wait_s": 5, "rollout__concurrency": 19, "rollout__concurrency_cap": 20},
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 18.9, "rollout__concurrency_cap": 20}),
    # below 60 %, and nobody waits: the cap has not come to its place yet
    ("cap-rising",
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 20, "rollout__concurrency_cap": 20, "rollout__vllm_kv_cache_usage_frac": 0.59,
      "rollout__vllm_queued_requests": 0.4},
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 20, "rollout__concurrency_cap": 20, "rollout__vllm_kv_cache_usage_frac": 0.6,
      "rollout__vllm_queued_requests": 0.4}),
    ("server-full",
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 20, "rollout__concurrency_cap": 20, "rollout__vllm_kv_cache_usage_frac": 0.2,
      "rollout__vllm_queued_requests": 3},
     {"perf__rollout_wait_s": 5, "rollout__concurrency": 20, "rollout__concurrency_cap": 20, "rollout__vllm_kv_cache_usage_frac": 0.2,
      "rollout__vllm_queued_requests": 0}),
    ("scoring-bound",
     # 32 groups of 8 in a step of 10 s, 2 s each: 64 of the 80 seconds of 8 places
     {"perf__rollout_wait_s": 5, "rollout__score_queue_size": 1, "rollout__score_s": 2.0, "group__target_slot_count": 256},
     {"perf__rollout_wait_s": 5, "rollout__score_queue_size": 1, "rollout__score_s": 1.99, "group__target_slot_count": 256}),
    ("few-signals", {"perf__rollout_wait_s": 5, "frac_reward_zero_std": 0.5}, {"perf__rollout_wait_s": 5, "frac_reward_zero_std": 0.49}),
    ("concurrency", {"rollout__concurrency": 61, "rollout__concurrency_cap": 64},
     {"rollout__concurrency": 60, "rollout__concurrency_cap": 64}),
    ("slow-sync", {"perf__weight_sync_s": 1.5}, {"perf__weight_sync_s": 1.49}),
    ("stale", {"sample__dropped_stale_count": 6, "batch__samples_per_step": 100},
     {"sample__dropped_stale_count": 4, "batch__samples_per_step": 100}),
    ("stale", {"rollout__failed_count": 5, "rollout__failed_stale_count": 5, "group__target_slot_count": 100},
     {"rollout__failed_count": 5, "rollout__failed_stale_count": 4.9, "group__target_slot_count": 100}),
    ("waste", {"tokens__generated": 100, "tokens__discarded/stale": 30}, {"tokens__generated": 100, "tokens__discarded/stale": 29}),
    ("failed-rollouts", {"rollout__failed_count": 5, "group__target_slot_count": 100},
     {"rollout__failed_count": 4.9, "group__target_slot_count": 100}),
    ("preemptions", {"rollout__vllm_preemption_count": 10, "group__target_slot_count": 100},
     {"rollout__vllm_preemption_count": 9, "group__target_slot_count": 100}),
    ("oversize", {"batch__dropped_oversize_count": 1}, {"batch__dropped_oversize_count": 0}),
    ("scoring-bound",  # as above, and the slowest function takes half of the 2 s
     {"perf__rollout_wait_s": 5, "rollout__score_queue_size": 1, "rollout__score_s": 2.0, "group__target_slot_count": 256,
      "rewards__right/call_s": 1.0, "rewards__style/call_s": 0.1},
     {"perf__rollout_wait_s": 5, "rollout__score_queue_size": 1, "rollout__score_s": 2.0, "group__target_slot_count": 256,
      "rewards__right/call_s": 0.99, "rewards__style/call_s": 0.1}),
    ("empty-rows", {"batch__row_fill_frac": 0.49, "batch__row_tokens_mean": 490, "sample__forwarded_tokens_max": 501},
     {"batch__row_fill_frac": 0.5, "batch__row_tokens_mean": 500, "sample__forwarded_tokens_max": 501}),
    # rows that are full of loss terms, of samples that share most tokens
    ("empty-rows", {"batch__row_fill_frac": 0.49, "batch__row_tokens_mean": 490, "sample__forwarded_tokens_max": 501},
     {"batch__row_fill_frac": 0.49, "batch__row_tokens_mean": 490, "sample__forwarded_tokens_max": 500}),
    ("uneven-ranks", {"batch__row_imbalance": 1.3}, {"batch__row_imbalance": 1.29}),
    ("solved", {"frac_reward_zero_std": 0.5, "reward_dropped": 0.9}, {"frac_reward_zero_std": 0.49, "reward_dropped": 0.9}),
    ("solved", {"frac_reward_zero_std": 0.6, "reward_dropped": 0.9}, {"frac_reward_zero_std": 0.6, "reward_dropped": 0.89}),
    ("stuck-low", {"frac_reward_zero_std": 0.6, "reward_dropped": 0.1}, {"frac_reward_zero_std": 0.6, "reward_dropped": 0.11}),
    ("mixed", {"frac_reward_zero_std": 0.6, "reward_dropped": 0.5}, {"frac_reward_zero_std": 0.4, "reward_dropped": 0.5}),
    ("no-signal", {"frac_reward_zero_std": 0.6, "reward_dropped": None}, {"frac_reward_zero_std": 0.4, "reward_dropped": None}),
    ("regression", {"frac_reward_zero_std": ramp(0.2, 0.26), "reward": ramp(0.6, 0.54)},
     {"frac_reward_zero_std": ramp(0.2, 0.26), "reward": ramp(0.6, 0.56)}),
    ("regression", {"frac_reward_zero_std": ramp(0.2, 0.26), "reward": ramp(0.6, 0.54)},
     {"frac_reward_zero_std": ramp(0.2, 0.24), "reward": ramp(0.6, 0.54)}),
    ("fallen", {"num": 20, "reward": lambda i: 0.7 if i < 9 else 0.49}, {"num": 20, "reward": lambda i: 0.7 if i < 9 else 0.51}),
    # 3 standard errors of a difference of two results of +- 0.04: 3 * sqrt(2) * 0.04 / 1.96 = 0.0866
    ("worse-evaluation", {"eval__held/reward": at_the_ends(0.6, 0.513), "eval__held/reward_ci95": at_the_ends(0.04, 0.04)},
     {"eval__held/reward": at_the_ends(0.6, 0.514), "eval__held/reward_ci95": at_the_ends(0.04, 0.04)}),
    ("worse-evaluation", {"eval__held/reward": at_the_ends(0.6, 0.54), "eval__held/reward_ci95": at_the_ends(0.01, 0.01)},
     {"eval__held/reward": at_the_ends(0.6, 0.56), "eval__held/reward_ci95": at_the_ends(0.01, 0.01)}),
    ("overfitting", {"eval__held/reward": at_the_ends(0.6, 0.5), "eval__held/reward_ci95": at_the_ends(0.04, 0.04),
                     "reward": ramp(0.5, 0.8)},
     {"eval__held/reward": at_the_ends(0.6, 0.5), "eval__held/reward_ci95": at_the_ends(0.04, 0.04), "reward": 0.5}),
    ("copies", {"completions__duplicate_frac": 0.79}, {"completions__duplicate_frac": 0.78}),  # 0.9 * 7/8 = 0.7875
    ("collapse", {"completions__duplicate_frac": ramp(0.2, 0.26), "entropy": ramp(1.0, 0.8)},
     {"completions__duplicate_frac": ramp(0.2, 0.24), "entropy": ramp(1.0, 0.8)}),
    ("collapse", {"completions__duplicate_frac": ramp(0.2, 0.26), "entropy": ramp(1.0, 0.8)},
     {"completions__duplicate_frac": ramp(0.2, 0.26), "entropy": ramp(0.8, 1.0)}),
    ("truncation", {"completions__clipped_ratio": 0.1}, {"completions__clipped_ratio": 0.09}),
    ("dead-reward", {"rewards__style/group_std": 0.0}, {"rewards__style/group_std": lambda i: 0.1 if i == 11 else 0.0}),
    ("dead-reward", {"rewards__style/call_s": 0.1}, {"rewards__style/call_s": 0.1, "rewards__style/mean": 0.5}),
    ("mismatch", {"parity__engine_gap": 0.05}, {"parity__engine_gap": 0.049}),
    ("out-of-range", {"sampling__masked_mean": 0.1}, {"sampling__masked_mean": 0.09}),
    ("low-head-mass", {"sampling__sampler_mass": 0.94}, {"sampling__sampler_mass": 0.95}),
    ("clipped-gradient", {"grad_norm": 20.0}, {"grad_norm": 19.0}),
]  # fmt: skip


@pytest.mark.parametrize("rule, inside, outside", BOTH_SIDES, ids=[f"{r[0]}-{i}" for i, r in enumerate(BOTH_SIDES)])
def test_both_sides_of_every_threshold(rule, inside, outside):
    assert rule in found(**inside)
    assert rule not in found(**outside)


def test_every_rule_has_its_two_sides_here():
    from agrpo.metrics import rules_of_flow, rules_of_signal

    for rule in (*rules_of_flow.RULES, *rules_of_signal.RULES):
        named = {f.rule for _, inside, _ in BOTH_SIDES if (f := rule(History(records(**inside), SETTINGS)))}
        assert named & {name for name, _, _ in BOTH_SIDES}, rule.__name__


def test_the_reward_range_decides_what_its_ends_are():
    shifted = {**SETTINGS, "scorer": {"reward_range": [-1.0, 1.0]}}
    assert "solved" in found(settings=shifted, frac_reward_zero_std=0.6, reward_dropped=0.8)
    assert "stuck-low" in found(settings=shifted, frac_reward_zero_std=0.6, reward_dropped=-0.8)
    unknown = found(settings={**SETTINGS, "scorer": {}}, frac_reward_zero_std=0.6)["no-signal"]
    assert unknown.override == "'scorer.reward_range=[0,1]'"


def test_a_stuck_run_with_cut_off_answers_is_told_to_let_them_be_longer():
    stuck = found(frac_reward_zero_std=0.6, reward_dropped=0.0, completions__clipped_ratio=0.1)["stuck-low"]
    assert stuck.override == "sampler.max_completion_length=200"
    assert not found(frac_reward_zero_std=0.6, reward_dropped=0.0, completions__clipped_ratio=0.09)[
        "stuck-low"
    ].override


def test_a_run_that_fell_early_is_not_told_that_its_prompts_are_too_hard():
    early = [0.59, 0.64, 0.03, 0.02, 0.019]
    verdicts = found(num=5, reward=lambda i: early[i], frac_reward_zero_std=0.9, reward_dropped=0.0)
    assert "it was 0.615" in verdicts["fallen"].text and "stuck-low" not in verdicts
    assert verdicts["fallen"].override == "optimizer.learning_rate=0.0001"


def test_a_run_that_fell_at_once_and_creeps_up_again_has_fallen():
    """The reward of a quickstart with three times its learning rate: no three records in a row are high."""
    course = [0.58, 0.38, 0.2, 0.26, 0.15, 0.19, 0.2, 0.16, 0.2, 0.25, 0.22, 0.25, 0.22, 0.22, 0.21, 0.21, 0.21, 0.26, 0.23, 0.29,
              0.29, 0.24, 0.18, 0.17, 0.2, 0.22, 0.27, 0.24, 0.26, 0.27, 0.37, 0.33, 0.27, 0.24, 0.35, 0.33, 0.36, 0.23, 0.28, 0.33]  # fmt: skip
    verdicts = found(num=40, reward=lambda i: course[i], completions__duplicate_frac=0.8)
    assert "is 0.309, it was 0.58" in verdicts["fallen"].text
    assert "copies" in verdicts  # that it has risen since is no excuse for them


def test_a_policy_that_has_learned_repeats_its_right_answers():
    """The last records neither rise nor lie within a tenth of the best reward."""
    learned = {"reward": lambda i: min(0.57 + 0.02 * i, 0.88), "completions__duplicate_frac": 0.81}
    assert "copies" not in found(num=40, **learned)


def test_too_few_places_are_named_where_most_groups_are_equal_too():
    waiting = {"perf__rollout_wait_s": 5, "frac_reward_zero_std": 0.6, "rollout__concurrency": 64}
    verdict = found(**waiting)["few-signals"]
    assert "64 of at most 64 rollouts are in flight: more at once" in verdict.change
    assert verdict.override == "rollout.max_concurrent_rollouts=128"
    verdict = found(**{**waiting, "rollout__concurrency": 30})["few-signals"]
    assert verdict.change == "The verdict mixed says why." and not verdict.override


def test_copies_of_right_answers_are_no_fault():
    same = {"completions__duplicate_frac": 0.87}
    assert "copies" in found(**same) and "copies" not in found(**same, reward=0.95)
    rising = {"completions__duplicate_frac": ramp(0.2, 0.4), "entropy": ramp(1.0, 0.5), "reward": ramp(0.5, 0.7)}
    assert found(**rising)["converging"].level == "note" and "collapse" not in found(**rising)


def test_at_staleness_zero_the_difference_is_mismatch():
    young = {**SETTINGS, "rollout": {**SETTINGS["rollout"], "max_staleness": 0}}
    gap = {"sampling__sampling_logp_difference/mean": 0.2}
    assert found(settings=young, **gap)["mismatch"].level == "warning" and "mismatch" not in found(**gap)


def test_samples_dropped_as_stale_are_a_share_of_all_steps_of_a_record():
    each = [{**r, "sample/dropped_stale_count": 6, "batch/samples_per_step": 100} for r in records()]
    tens = {**SETTINGS, "logger": {"logging_steps": 10}}
    assert "stale" in {f.rule for f in findings(each, SETTINGS)}
    assert "stale" not in {f.rule for f in findings([{**r, "step": 10 * r["step"]} for r in each], tens)}


def test_a_record_counts_for_as_many_steps_as_it_covers():
    """The first step, nine more, an evaluation, ten, and the three that are left; of a run resumed at 40 the first one covers ten."""
    tens = {"logger": {"logging_steps": 10}}

    def seconds(*steps):
        return History([{"step": s, **({"perf/step_s": 2.0} if isinstance(s, int) else {"eval/held/reward": 1})} for s in steps], tens)

    assert seconds(1, 10, 10.0, 20, 23).over_steps("perf/step_s") == 2.0 * 23
    assert seconds(50, 60).over_steps("perf/step_s") == 2.0 * 20


def test_figures_are_those_of_the_last_ten_records_and_not_of_the_first():
    waiting = found(num=30, perf__rollout_wait_s=lambda i: 100.0 if i == 0 else 5.0 if i >= 20 else 0.0)
    assert "waits 5.00 s of each 10.00 s step (50 %)" in waiting["generation-bound"].text


def test_an_evaluation_before_the_first_step_does_not_hide_the_start_of_the_run():
    steps = records(num=6, perf__rollout_wait_s=lambda i: 9.0 if i == 0 else 0.5)
    assert History([{"step": 0, "eval/held/reward": 0.5}, *steps], {}).now("perf/rollout_wait_s") == 0.5


@pytest.mark.parametrize("num", [2, 3, 4])
def test_the_start_of_a_short_run_is_no_verdict_on_its_steps(num):
    assert "generation-bound" not in found(num=num, perf__rollout_wait_s=lambda i: 9.0 if i == 0 else 0.5)


def test_a_run_in_which_nothing_was_scored_has_verdicts_too():
    free = {**SETTINGS, "scorer": {}}
    nothing = {"reward": None, "eval__held/reward": at_the_ends(0.6, 0.3), "eval__held/reward_ci95": at_the_ends(0.04, 0.04)}
    assert {"no-signal", "copies", "worse-evaluation"} <= found(settings=free, completions__duplicate_frac=0.9, **nothing).keys()


def test_a_limit_that_was_switched_off_warns_of_nothing():
    never = {**SETTINGS, "run": {**SETTINGS["run"], "parity_warn": None}}
    assert found(settings=never, parity__engine_gap=0.3)["mismatch"].level == "note"
    assert found(parity__engine_gap=0.3)["mismatch"].level == "warning"


def test_warnings_come_first_and_an_unchanged_verdict_is_no_change():
    levels = [
        f.level
        for f in findings(
            records(perf__rollout_wait_s=5, batch__row_fill_frac=0.1, batch__row_tokens_mean=100, sample__forwarded_tokens_max=900),
            SETTINGS,
        )
    ]
    assert levels == ["warning", "note", "fine"]
    one, two = findings(records(perf__rollout_wait_s=5), SETTINGS), findings(records(perf__rollout_wait_s=6), SETTINGS)
    assert not changes(one, two) and changes(one, findings(records(), SETTINGS))


def test_a_limit_that_no_answer_reached_is_not_the_one_to_raise():
    cut = {"completions__clipped_ratio": 0.5, "completions__max_length": 80, "frac_reward_zero_std": 0.6, "reward_dropped": 0.0}
    for rule in ("truncation", "stuck-low"):
        verdict = found(**cut)[rule]
        assert not verdict.override and "the longest had 80 tokens" in verdict.text and "server.max_model_len" in verdict.text
        assert found(**{**cut, "completions__max_length": 100})[rule].override == "sampler.max_completion_length=200"


def test_longer_answers_need_rows_and_a_context_that_hold_them():
    cut = {"completions__clipped_ratio": 0.5, "completions__max_length": 100}
    held = {**SETTINGS, "packer": {"token_budget": 400}, "server": {"max_model_len": 250}}
    for longest, override in (
        (150, "sampler.max_completion_length=200"),  # 250 fit in both
        (151, "sampler.max_completion_length=200 server.max_model_len=350"),
        (301, "sampler.max_completion_length=200 packer.token_budget=500 server.max_model_len=350"),
    ):
        assert found(settings=held, sample__forwarded_tokens_max=longest, **cut)["truncation"].override == override


def test_more_head_log_probs_need_a_server_that_gives_them():
    for most, more in ((17, ""), (16, " server.max_logprobs=17")):
        settings = {**SETTINGS, "server": {"max_logprobs": most}}
        assert found(settings=settings, sampling__sampler_mass=0.9)["low-head-mass"].override == f"sampler.num_sampler_logprobs=16{more}"


def test_preemptions_of_every_sync_are_not_called_a_small_cache():
    reset = {**SETTINGS, "sync": {"every_steps": 1, "cache": "reset"}}
    many = {"rollout__vllm_preemption_count": 30, "group__target_slot_count": 100}
    half_empty = found(settings=reset, **many, rollout__vllm_kv_cache_usage_frac=0.4)["preemptions"]
    assert "KV cache is 40 % full" in half_empty.text and half_empty.override == "sync.cache=salt"
    full = found(settings=reset, **many, rollout__vllm_kv_cache_usage_frac=0.9)["preemptions"]
    assert "too small" in full.text and full.override == "rollout.max_concurrent_rollouts=32"


def test_a_setting_is_named_only_where_it_changes_something():
    copies = {"completions__duplicate_frac": 7 / 8}
    assert not found(**copies)["copies"].override
    cold = {**SETTINGS, "sampler": {**SETTINGS["sampler"], "temperature": 0.3}}
    assert found(settings=cold, **copies)["copies"].override == "sampler.temperature=1.0"
    waiting = {"perf__rollout_wait_s": 5}
    assert "more devices" not in found(**waiting)["generation-bound"].text
    assert "agrpo explain" in found(settings=ON_GPUS, **waiting)["generation-bound"].text
    elsewhere = {**SETTINGS, "run": {**SETTINGS["run"], "devices": {"server": [], "trainer": [0]}}}
    assert "server.base_url" in found(settings=elsewhere, **waiting)["generation-bound"].change
    assert "run.num_processes" in found(settings=elsewhere, rollout__backpressure_s_per_step=5)["trainer-bound"].change
    kept = {**SETTINGS, "advantage": {"drop_zero_std": False}}  # groups of equal rewards fill a step as others do
    assert "generation-bound" in found(settings=kept, frac_reward_zero_std=0.9, **waiting)


def test_what_no_server_measures_is_not_said_of_it():
    full = {"perf__rollout_wait_s": 5, "rollout__concurrency": 64, "rollout__concurrency_cap": 64}
    assert "KV cache" not in found(**full)["too-few-places"].text
    assert "KV cache is 20 % full" in found(**full, rollout__vllm_kv_cache_usage_frac=0.2)["too-few-places"].text


def test_a_longer_row_is_named_also_where_its_length_was_not_set():
    free = {**SETTINGS, "packer": {"token_budget": None}}
    rows = {"batch__row_fill_frac": 0.4, "batch__row_tokens_mean": 400, "sample__forwarded_tokens_max": 900, "batch__row_imbalance": 2.0}
    for rule in ("empty-rows", "uneven-ranks"):
        assert found(settings=free, **rows)[rule].override == "packer.token_budget=2000"


def test_ranks_of_several_nodes_wait_for_each_other_too():
    for num_nodes, is_said in ((1, False), (2, True)):
        settings = {**SETTINGS, "run": {"num_processes": 1, "num_nodes": num_nodes}}
        assert ("uneven-ranks" in found(settings=settings, batch__row_imbalance=2.0)) == is_said


def test_rollouts_given_up_as_too_old_are_no_failures():
    given_up = {"rollout__failed_count": 30, "rollout__failed_stale_count": 30, "group__target_slot_count": 100}
    verdicts = found(**given_up)
    assert "failed-rollouts" not in verdicts and verdicts["stale"].override == "rollout.max_staleness=8"
    told = found(**{**given_up, "rollout__failed_stale_count": 0, "rollout__failed_prompt_too_long_count": 30})["failed-rollouts"]
    assert "server.max_model_len" in told.text and "logs/" not in told.text  # the log does not name those


def test_a_reward_is_dead_by_what_rounding_leaves_and_only_where_siblings_are_compared():
    """Seven times 0.1 have a standard deviation of 1.4e-17 in float64."""
    spread = float(np.std([0.1] * 7))
    assert spread > 0
    constant = {"rewards__style/group_std": spread, "rewards__style/mean": 0.1}
    assert "style" in found(**constant)["dead-reward"].text
    assert "dead-reward" not in found(**{**constant, "rewards__style/group_std": 1e-3})
    alone = {**SETTINGS, "advantage": {"mean_level": "batch", "std_level": None}}
    assert "dead-reward" not in found(settings=alone, **constant)


@pytest.mark.parametrize(
    ("server", "override"),
    [
        ({"dtype": "auto"}, "server.dtype=float32"), ({"dtype": "float32"}, ""), ({"base_url": "http://there:8000"}, ""),
        ({"dtype": None}, ""),  # that of the trainer's weights
    ],
)  # fmt: skip
def test_the_precision_of_a_server_is_named_where_it_can_be_raised(server, override):
    verdict = found(settings={**SETTINGS, "server": server, "model": {"dtype": "float32"}}, parity__engine_gap=0.2)["mismatch"]
    assert verdict.override == override and "serve-check OVERRIDES --probe" in verdict.text


def test_bounds_are_named_as_the_loss_names_them():
    for loss, words in (({"clip_min": 0.5}, "[loss.clip_min, loss.clip_max]"), ({"upper": 2.0}, "[loss.lower, loss.upper]")):
        assert words in found(settings={**SETTINGS, "loss": loss}, sampling__masked_mean=0.2)["out-of-range"].text


def test_rollouts_are_to_be_looked_at_where_they_were_recorded():
    dull = {"frac_reward_zero_std": 0.6, "reward_dropped": 0.5}
    assert found(**dull)["mixed"].text.endswith("agrpo view RUN, of a run with logger.log_completions=true.")
    for key, name in (("rollout", "dump_to_file"), ("logger", "log_completions")):
        settings = {**SETTINGS, key: {**SETTINGS.get(key, {}), name: True}}
        assert found(settings=settings, **dull)["mixed"].text.endswith("agrpo view RUN.")


def test_waste_says_what_to_do_about_its_reason():
    for reason, words in (("zero_std", "rollout.group_size"), ("stale", "rollout.max_staleness"), ("error", "logs/rollout.log")):
        assert words in found(**{"tokens__generated": 100, f"tokens__discarded/{reason}": 40})["waste"].text


def test_every_override_is_one_that_the_command_line_takes():
    overrides = {f.override for _, inside, _ in BOTH_SIDES for f in found(**inside).values() if f.override}
    assert len(overrides) >= 8
    for override in sorted(overrides):
        key, value = override.strip("'").split("=", 1)
        more = ["server=vllm"] if key.startswith("server.dtype") else []
        tree = compose_tree(["+recipe=quickstart", *more, override.strip("'")])
        for part in key.split("."):
            assert part in tree, override
            tree = tree[part]


def test_a_change_is_that_of_the_straight_line():
    history = History([{"step": i, "x": i / 10} for i in range(12)], {})
    assert history.change("x") == pytest.approx(0.9) and history.now("x") == pytest.approx(0.65)
    assert history.best("x") == pytest.approx(1.0) and history.change("y") is None
    assert (share(0.423), share(0.004), share(0)) == ("42 %", "0.4 %", "0 %")


def noise(seed, num, mean=0.5, deviation=0.1):
    """What the mean reward of a policy that does not change looks like."""
    values = np.random.default_rng(seed).normal(mean, deviation, num)
    return lambda i: float(values[i])


@pytest.mark.parametrize("scorer", [{}, {"reward_range": [0.0, 1.0]}], ids=["unknown range", "known range"])
def test_noise_is_no_fall(scorer):
    lengths, num_seeds = (4, 5, 8, 12, 30, 60, 200), 40
    false = [
        (num, seed)
        for num in lengths
        for seed in range(num_seeds)
        if {"fallen", "regression"}
        & set(found(num, {**SETTINGS, "scorer": scorer}, reward=noise(seed, num), frac_reward_zero_std=noise(-seed % 97, num, 0.2, 0.05)))
    ]  # fmt: skip
    assert len(false) <= 0.02 * len(lengths) * num_seeds, false


@pytest.mark.parametrize("reward", [0.0, 0.3, 1e6])
def test_equal_rewards_neither_fall_nor_rise(reward):
    unknown = {**SETTINGS, "scorer": {}}
    for num in (5, 12, 40):
        verdicts = found(num, unknown, reward=reward, completions__duplicate_frac=0.9)
        assert "fallen" not in verdicts and "copies" in verdicts


@pytest.mark.parametrize("num", [30, 60, 200])
def test_a_fall_is_found_in_the_same_noise(num):
    """From 0.6 to 0.2 at once, and from 0.7 to 0.1 over the last half of the run."""

    def at_once(i):
        return -0.4 if i >= num - 10 else 0.0

    def slowly(i):
        return -0.6 * max(i - num // 2, 0) / (num - num // 2)

    for mean, shape in ((0.6, at_once), (0.7, slowly)):
        runs = [noise(seed, num, mean) for seed in range(40)]
        told = [found(num, {**SETTINGS, "scorer": {}}, reward=lambda i, r=r, s=shape: r(i) + s(i)) for r in runs]
        assert sum("fallen" in verdicts for verdicts in told) >= 38


def test_copies_are_told_also_when_the_reward_is_noise():
    same = {"completions__duplicate_frac": 7 / 8}
    missed = [seed for seed in range(40) if "copies" not in found(12, **same, reward=noise(seed, 12))]
    assert len(missed) <= 1, missed
    assert "copies" not in found(**same, reward=ramp(0.3, 0.7))  # it learns them
    assert "copies" in found(settings={**SETTINGS, "scorer": {}}, **same, reward=0.99)  # nobody says that this is good


def test_a_slow_rise_over_the_whole_run_makes_a_narrowing_policy_a_converging_one():
    narrowing = {"completions__duplicate_frac": ramp(0.2, 0.4, 60), "entropy": ramp(1.0, 0.5, 60)}
    assert "converging" in found(60, **narrowing, reward=lambda i: 0.3 + 0.004 * i)
    assert "collapse" in found(60, **narrowing, reward=0.5)


def test_a_sync_that_is_made_every_few_steps_is_no_part_of_each():
    """4 s in every fourth record, steps of 5 s: a fifth of the time."""
    seldom = {**SETTINGS, "sync": {"every_steps": 4}}
    taken = {"perf__step_s": 5.0, "perf__weight_sync_s": lambda i: 4.0 if i % 4 == 3 else None}
    verdict = found(40, seldom, **taken)["slow-sync"]
    assert "takes 4.00 s after every 4 steps of 5.00 s (20 %)" in verdict.text
    assert verdict.override == "sync.every_steps=8"
    taken["perf__weight_sync_s"] = lambda i: 2.9 if i % 4 == 3 else None
    assert "slow-sync" not in found(40, seldom, **taken)


def test_groups_of_equal_rewards_that_are_trained_are_judged_by_the_reward():
    kept = {**SETTINGS, "advantage": {"drop_zero_std": False, "mean_level": "group", "std_level": "group"}}
    for reward, rule in ((0.95, "solved"), (0.5, "mixed"), (0.05, "stuck-low")):
        verdicts = found(settings=kept, frac_reward_zero_std=0.6, reward_dropped=None, reward=reward)
        assert rule in verdicts and "no-signal" not in verdicts and "that of all groups" in verdicts[rule].text
    ungrouped = {**SETTINGS, "advantage": {"drop_zero_std": True, "mean_level": "batch", "std_level": None}}
    assert "mixed" in found(settings=ungrouped, frac_reward_zero_std=0.6, reward_dropped=None)
    none = found(settings=kept, frac_reward_zero_std=1.0, reward_dropped=None, reward=None)["no-signal"]
    assert "every source gave None" in none.text


def test_at_staleness_zero_a_window_is_told_to_open():
    young = {**SETTINGS, "rollout": {**SETTINGS["rollout"], "max_staleness": 0}}
    both = {"perf__rollout_wait_s": 2.0, "rollout__backpressure_s_per_step": 2.0}
    assert found(settings=young, **both)["window-bound"].override == "rollout.max_staleness=1"

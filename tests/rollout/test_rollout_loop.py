"""The producing loop, from prompts to what the trainer is sent."""

import asyncio
import threading
import time

import numpy as np
import pytest

from agrpo import wire
from agrpo.errors import ContractError, ServerError, StallError
from agrpo.eval import Evaluation
from agrpo.rollout.evaluating import Opened
from tests.rollout.loop_harness import PROMPT_TOKENS, RAW, TOKENS, G, Prompts, done, produce, until
from tests.stub_server import control, report


def test_groups_arrive_whole_with_advantages_and_versions(url, tmp_path):
    trainer = produce(url, tmp_path, done(20))
    assert trainer.resolved == []
    assert sorted(g.group_id for g in trainer.ready)[:15] == list(range(15))
    group = next(g for g in trainer.ready if g.group_id == 7)
    assert (group.row_index, group.epoch, group.version) == (2, 1, 1)
    assert group.rewards.tolist() == [0, 1, 2] == group.source_rewards["points"].tolist()
    np.testing.assert_allclose([s.advantage for s in group.samples], [-1.22474, 0, 1.22474], atol=1e-5)
    for slot, sample in enumerate(group.samples):
        assert len(sample.token_ids) == RAW and sample.rollout_index == slot
        assert sample.loss_mask.tolist() == [False] * PROMPT_TOKENS + [True] * TOKENS
        assert sample.versions[sample.loss_mask].tolist() == [1] * TOKENS
        assert sample.head_ids.shape == (TOKENS, 2)
    record = trainer.window.record(1)
    assert record["reward"] == 1.0 and record["rewards/points/mean"] == 1.0 and record["frac_reward_zero_std"] == 0
    assert record["completions/mean_length"] == TOKENS and record["completions/clipped_ratio"] == 1.0
    assert record["rollout/samples_per_rollout"] == 1.0 and record["rollout/failed_count"] == 0
    assert record["group/usable_slot_count"] == record["group/target_slot_count"]


def test_seeds_of_all_requests_differ_and_groups_that_are_done_are_left_out(url, tmp_path):
    start = wire.Start(3, 4, [(0, 3), (5, 6)], [4], 0, 0, 10_000)
    trainer = produce(url, tmp_path, done(3), start=start)
    assert sorted(g.group_id for g in trainer.ready)[:3] == [3, 6, 7]
    assert all(g.version == 4 for g in trainer.ready)
    seeds = [body["sampling_params"]["seed"] for body in report(url)["seen"]]
    assert len(set(seeds)) == len(seeds) >= 9


def test_a_failed_slot_costs_only_itself(url, tmp_path):
    control(url, faults=["400", "logprobs"])
    trainer = produce(url, tmp_path, done(4), cap=1)
    # Slots 0 and 1 of group 0 failed: one usable rollout is no group.
    assert trainer.resolved == [(0, "unusable")]
    control(url, faults=["400"])
    trainer = produce(url, tmp_path, done(3), cap=1)
    assert trainer.resolved == []
    group = next(g for g in trainer.ready if g.group_id == 0)
    assert group.rollout_indices.tolist() == [1, 2] == [s.rollout_index for s in group.samples]
    record = trainer.window.record(1)
    assert record["rollout/failed_count"] == 1 == record["rollout/failed_rejected_count"]
    control(url, faults=["400"])
    assert produce(url, tmp_path, done(2), cap=1, drop_incomplete_group=True).resolved == [(0, "incomplete")]


def test_too_many_failures_end_the_run_with_their_reasons(url, tmp_path):
    control(url, faults=["400!"])
    with pytest.raises(ServerError, match=r"rollouts failed \(rejected \d+\).*max_failure_frac=0.5.*stub says 400"):
        produce(url, tmp_path, done(1000))
    control(url, faults=["400"])
    with pytest.raises(ServerError, match="rollout.on_error=abort.*stub says 400"):
        produce(url, tmp_path, done(1000), on_error="abort")


def test_groups_without_signal_are_counted_and_give_their_credit_back(url, tmp_path):
    held = []

    async def scenario(trainer, loop):
        await until(lambda: trainer.num_done >= 60)
        held.append(loop.admission.held_tokens)

    def reward(group, slot):
        return None if group % 3 == 1 else float(slot) if group % 3 == 0 else 1.0

    limit = 4 * G * RAW
    trainer = produce(url, tmp_path, scenario, reward=reward, start=wire.Start(0, 1, [], [], 0, 0, limit))
    reasons = {group: reason for group, reason in trainer.resolved}
    assert all(reasons[g] == ("under_scored" if g % 3 == 1 else "zero_std") for g in reasons)
    assert all(g.group_id % 3 == 0 for g in trainer.ready) and len(trainer.ready) >= 15
    assert held[0] < limit + G * RAW
    record = trainer.window.record(1)
    assert record["reward_dropped"] == 1.0 and 0.6 < record["frac_reward_zero_std"] < 0.72


def test_a_score_that_cannot_be_had_drops_the_group_and_a_broken_contract_ends_the_run(url, tmp_path):
    trainer = produce(url, tmp_path, done(6), reward=lambda g, s: ValueError("no") if g % 2 else float(s))
    assert all(reason == "scorer_error" and group % 2 for group, reason in trainer.resolved)
    with pytest.raises(ContractError, match="wrong length"):
        produce(url, tmp_path, done(6), reward=lambda g, s: ContractError("wrong length"))


def test_generation_stops_at_the_limit_and_goes_on_with_credit(url, tmp_path):
    limit = 4 * G * RAW

    async def scenario(trainer, loop):
        await until(lambda: len(trainer.ready) == 4)
        await asyncio.sleep(0.3)
        assert len(trainer.ready) == 4 and loop.admission.held_tokens == limit
        trainer.take(2 * G * RAW)
        await until(lambda: len(trainer.ready) == 6)
        await asyncio.sleep(0.2)
        assert len(trainer.ready) == 6

    trainer = produce(url, tmp_path, scenario, takes=False, start=wire.Start(0, 1, [], [], 0, 0, limit))
    # The second group waits for the first to end, the fifth 0.3 s for credit; those that need not wait are no waits.
    assert trainer.window.get("rollout/backpressure_s") > 0.1
    assert '"phase": "waiting for the trainer"' in (tmp_path / "state" / "rollout.alive.json").read_text()


def test_a_closed_gate_lets_nothing_start(url, tmp_path):
    async def scenario(trainer, loop):
        await until(lambda: len(trainer.ready) >= 3)
        trainer.takes = False
        trainer.listener.send(wire.Credit(trainer.taken, trainer.taken, 10_000, gate_closed=True))
        await asyncio.sleep(0.2)
        count = report(url)["num_requests"]
        await asyncio.sleep(0.3)
        assert report(url)["num_requests"] == count
        trainer.listener.send(wire.VersionUpdate(2))
        trainer.listener.send(wire.Credit(trainer.taken, trainer.taken, 10_000))
        await until(lambda: trainer.ready[-1].version == 2)

    produce(url, tmp_path, scenario)


def test_no_more_requests_than_the_cap_are_in_flight(url, tmp_path):
    control(url, delay_s=0.02)
    produce(url, tmp_path, done(6), cap=4)
    assert report(url)["max_in_flight"] == 4


def test_prompts_that_fill_the_context_are_skipped(url, tmp_path):
    prompts = Prompts({1: 4099, 2: 5000})
    trainer = produce(url, tmp_path, done(6), prompts=prompts)
    assert sorted(trainer.resolved) == [(1, "prompt_too_long"), (2, "prompt_too_long")]
    assert trainer.window.get("rollout/skipped_prompt_count") == 2
    with pytest.raises(ContractError, match="row 1 has 4099 tokens.*on_long_prompt"):
        produce(url, tmp_path, done(6), prompts=prompts, on_long_prompt="abort")


def test_a_full_score_queue_holds_generation_and_groups_are_scored_side_by_side(url, tmp_path):
    async def scenario(trainer, loop):
        await asyncio.sleep(0.5)
        # One group being scored, one in the queue, and the few that were in flight when it filled up.
        assert report(url)["num_requests"] <= 8 * G
        await until(lambda: trainer.num_done >= 2)

    trainer = produce(url, tmp_path, scenario, score_s=0.4, queue_size=1, max_concurrent_groups=1, cap=2 * G)
    assert trainer.window.get("rollout/score_block_s") > 0 and trainer.scorer.num_most == 1
    assert produce(url, tmp_path, done(9), score_s=0.3, max_concurrent_groups=8).scorer.num_most == 8


def test_evaluations_run_at_the_start_and_when_asked_and_report_one_version(url, tmp_path):
    evaluation = Evaluation(data=None, num_rollouts=2, temperature=0.5, max_prompts=3)

    async def scenario(trainer, loop):
        await until(lambda: len(trainer.evals) == 1 and len(trainer.ready) > 2)
        trainer.listener.send(wire.RunEval(1, ["heldout"], True))
        await until(lambda: len(trainer.evals) == 2)

    def reward(group, slot):
        return float(slot) if group >= 0 else 1.0 - slot * 0.5

    evaluations = {"heldout": Opened(evaluation, Prompts())}
    trainer = produce(url, tmp_path, scenario, evaluations=evaluations, reward=reward)
    assert [(e.name, e.result["version"], e.result["reward"]) for e in trainer.evals] == [
        ("heldout", 1, 0.75),
        ("heldout", 1, 0.75),
    ]
    assert all(e.result["rollouts_count"] == 6 and e.result["mean_length"] == TOKENS for e in trainer.evals)
    first = report(url)["seen"][:6]
    assert all(body["sampling_params"]["temperature"] == 0.5 for body in first)
    assert len({body["sampling_params"]["seed"] for body in first}) == 6


def test_a_resumed_run_does_not_evaluate_at_the_start(url, tmp_path):
    evaluation = Evaluation(data=None, max_prompts=3)
    start = wire.Start(3, 4, [(0, 3)], [], 0, 0, 10_000)
    assert produce(url, tmp_path, done(2), start=start, evaluations={"heldout": Opened(evaluation, Prompts())}).evals == []


def test_a_filter_drops_groups_and_must_not_raise(url, tmp_path):
    trainer = produce(url, tmp_path, done(6), accept=lambda group: group.group_id % 2 == 0)
    assert all(reason == "rejected" and group % 2 for group, reason in trainer.resolved)
    assert trainer.window.get("group/rejected_count") == len(trainer.resolved)
    with pytest.raises(ContractError, match="accept_fn raised ZeroDivisionError"):
        produce(url, tmp_path, done(6), accept=lambda group: 1 / 0)


def test_a_filter_that_never_returns_does_not_keep_the_process_from_saying_so(url, tmp_path):
    """The event loop waits for its own threads as it closes, before the process can leave its reason."""
    release = threading.Event()
    start = wire.Start(0, 1, [], [], 0, 0, G * RAW)
    began = time.monotonic()
    with pytest.raises(StallError):
        produce(url, tmp_path, done(1), start=start, progress_timeout=0.5, accept=lambda group: release.wait(20))
    assert time.monotonic() - began < 15
    release.set()


def test_a_run_without_progress_ends_with_what_it_waited_for(url, tmp_path):
    control(url, faults=["hang!"])
    with pytest.raises(StallError, match=r"progress_timeout=0.5.*oldest is 0\.0 for .*no server has answered"):
        produce(url, tmp_path, done(1), progress_timeout=0.5)


def test_waiting_for_the_trainer_is_no_stall(url, tmp_path):
    async def scenario(trainer, loop):
        await asyncio.sleep(2.5)

    start = wire.Start(0, 1, [], [], 0, 0, G * RAW)
    produce(url, tmp_path, scenario, takes=False, start=start, progress_timeout=1.6)


def test_the_end_of_the_trainer_ends_the_loop(url, tmp_path):
    async def scenario(trainer, loop):
        await until(lambda: trainer.ready)
        trainer.listener.close()
        await asyncio.sleep(5)

    with pytest.raises(wire.WireError, match="closed the connection"):
        produce(url, tmp_path, scenario)

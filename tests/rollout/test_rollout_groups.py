"""Groups with missing rollouts and rollouts of several rows, from the workflow to the trainer (AREAL-WF-37 to 60)."""

import asyncio
import dataclasses

import numpy as np
import pytest

from agrpo.advantage import Grouped
from agrpo.env import workflow_context
from agrpo.env.workflow import Interaction, ModelRequest, RolloutWorkflow
from agrpo.env.workflow_player import WorkflowPlayer
from agrpo.errors import ContractError
from agrpo.metrics.window import Window
from agrpo.rollout import report
from agrpo.rollout.concurrency import Cap, Places
from agrpo.rollout.judge import Dropped, Judge
from agrpo.rollout.unscored import Unscored
from agrpo.sections import Rollout as Settings
from agrpo.types import Group, Prompt, Rollout
from tests.rollout.loop_harness import TOKENS, G, Words, done, produce

NAMES = (
    "group/target_slot_count", "group/usable_slot_count", "group/trainable_slot_count", "group/fully_masked_group",
    "group/singleton_slot_group", "group/pre_filter_usable_slot_yield", "group/pre_filter_trainable_slot_yield",
)  # fmt: skip


@pytest.mark.parametrize(
    ("usable", "size", "settings", "expected", "reason"),
    [
        (2, 3, {}, (3, 2, 2, 0, 0, 2 / 3, 2 / 3), None),
        (0, 3, {}, (3, 0, 0, 1, 0, 0, 0), "unusable"),
        (1, 3, {}, (3, 1, 0, 0, 1, 1 / 3, 0), "unusable"),
        (1, 2, {"drop_incomplete_group": True}, (2, 1, 0, 0, 1, 1 / 2, 0), "incomplete"),
    ],
)
def test_group_metrics_row_by_row(usable, size, settings, expected, reason):
    rollouts = [
        Rollout((), [], {"points": float(i)}, failure=None if i < usable else "returned_none") for i in range(size)
    ]
    group = Group(0, Prompt(0, 0, [], {}), tuple(rollouts), 0)
    window, section = Window(strict=True), Settings(group_size=size, **settings)
    judge = Judge(None, Grouped(), section, 7, 1, 1, None, window)
    report.record_slots(window, group, size)
    if reason is None:
        judge._check_size(group)
    else:
        with pytest.raises(Dropped) as dropped:
            judge._check_size(group)
        assert dropped.value.reason == reason
    record = window.record(1)
    assert tuple(record[name] for name in NAMES) == pytest.approx(expected)
    assert record.get("group/rejected_count", 0) == (usable == 0)


class Rows(RolloutWorkflow):
    """Per slot the rewards of its interactions; None rejects."""

    rewards = ([0.81, 0.9, 1.0], [0.0, 0.0], None)
    references = (1.0, 0.0, None)

    async def arun_episode(self, engine, data):
        context = workflow_context.get()
        await asyncio.sleep(0.01 * (G - context.sample_idx))  # slots end in another order than they began
        own = self.rewards[context.sample_idx]
        if own is None:
            return None
        found = {}
        for at, reward in enumerate(own):
            answer = await engine.agenerate(ModelRequest(input_ids=[2, 3 + at]))
            found[f"{context.sample_idx}/{at}"] = Interaction(
                model_response=answer, reward=reward, rollout_reward=self.references[context.sample_idx]
            )
        return found


def player_of(workflow):
    def make(sampler, section, max_model_len, version):
        return WorkflowPlayer(
            workflow, tokenizer=Words(), sampler=sampler, max_model_len=max_model_len, eos_ids=frozenset({1}),
            settings=section, centering=True, version=version,
        )  # fmt: skip

    return make


def test_rows_of_a_rollout_are_compared_by_one_reference(url, tmp_path):
    advantage = Grouped(eps=1e-5)
    trainer = produce(url, tmp_path, done(5), player_of=player_of(Rows()), reward=None, advantage=advantage)
    assert trainer.resolved == []
    group = trainer.ready[0]
    assert [s.rollout_index for s in group.samples] == [0, 0, 0, 1, 1]
    found = [s.advantage for s in group.samples]
    np.testing.assert_allclose(found, [0.61999, 0.79998, 0.99998, -0.99998, -0.99998], atol=1e-5)
    assert group.rewards.tolist() == [1.0, 0.0] == group.references.tolist()
    np.testing.assert_allclose([s.reward for s in group.samples], [0.81, 0.9, 1.0, 0, 0])
    assert all(s.num_trained_tokens == TOKENS and s.versions[-1] == 1 for s in group.samples)
    record = trainer.window.record(1)
    assert record["group/pre_filter_usable_slot_yield"] == pytest.approx(2 / 3)
    assert record["rollout/samples_per_rollout"] == 2.5 and record["rewards/workflow/mean"] == 0.5
    assert record["rollout/failed_returned_none_count"] == record["group/target_slot_count"] / 3


class Nothing(Rows):
    rewards, references = (None, None, None), (None, None, None)


def test_rejected_episodes_drop_groups_and_never_end_the_run(url, tmp_path):
    trainer = produce(url, tmp_path, done(20), player_of=player_of(Nothing()), reward=None, on_error="abort")
    assert not trainer.ready and {reason for _, reason in trainer.resolved} == {"unusable"}


class Differing(Rows):
    rewards, references = ([1.0, 2.0], [0.0], [1.0]), (None, None, None)


class SameIds(Rows):
    async def arun_episode(self, engine, data):
        found = await super().arun_episode(engine, data)
        return found and {key.split("/")[1]: value for key, value in found.items()}


def test_broken_contracts_end_the_run(url, tmp_path):
    with pytest.raises(
        ContractError, match=r"Differing: the rows of one episode have different rewards.*rollout_reward"
    ):
        produce(url, tmp_path, done(9), player_of=player_of(Differing()), reward=None)
    with pytest.raises(ContractError, match="SameIds: the interaction id '0' occurs in two episodes"):
        produce(url, tmp_path, done(9), player_of=player_of(SameIds()), reward=None)


def test_a_filter_sees_the_merged_rows(url, tmp_path):
    seen = []

    def accept(group):
        seen.append(group)
        return 0 < group["rewards"].mean() < 0.5

    trainer = produce(url, tmp_path, done(3), player_of=player_of(Rows()), reward=None, accept=accept)
    assert not trainer.ready and {reason for _, reason in trainer.resolved} == {"rejected"}
    np.testing.assert_allclose(seen[0]["rewards"], [0.81, 0.9, 1.0, 0, 0])
    assert seen[0]["input_ids"].shape == (5, 2 + TOKENS) == seen[0]["loss_mask"].shape


class Sometimes:
    """Scores the groups whose id is in `scored`, and raises for the others."""

    def __init__(self, scored):
        self.scored = scored

    async def score(self, group):
        if group.group_id not in self.scored:
            raise OSError("judge.example: connection refused")
        return dataclasses.replace(
            group, rollouts=tuple(dataclasses.replace(r, rewards={"points": 1.0}) for r in group.rollouts)
        )


def endings(scored, num_groups, unscored):
    """What becomes of each group in turn, up to the one that ends the run."""

    async def play():
        places, found = Places(Cap(4, 4)), []
        judge = Judge(Sometimes(scored), Grouped(), Settings(group_size=2), 7, 1, 1, None, Window(), unscored=unscored)
        for number in range(num_groups):
            rollouts = (Rollout((), [], {}), Rollout((), [], {}))
            try:
                await judge.ready(Group(number, Prompt(number, 0, [], {}), rollouts, 0), places)
            except Dropped as dropped:
                found.append(dropped.reason)
            except ContractError as error:
                return [*found, str(error)]
        return found

    return asyncio.run(play())


def test_a_function_that_scores_nothing_any_more_ends_the_run_and_one_that_recovers_does_not():
    *before, last = endings({2}, 20, Unscored(in_a_row=5, lasting_s=0.0))
    assert before == ["scorer_error"] * 2 + ["zero_std"] + ["scorer_error"] * 4
    assert last.startswith("5 groups in a row were not scored, for 0 s; the last: judge.example: connection refused")
    assert endings({4, 9, 14, 19}, 20, Unscored(in_a_row=5, lasting_s=0.0)).count("scorer_error") == 16
    assert endings((), 20, Unscored(in_a_row=5, lasting_s=60.0)) == ["scorer_error"] * 20

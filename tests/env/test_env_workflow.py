"""Workflows: what an episode returns becomes samples, token for token; a broken contract names the field (AREAL-WF)."""

import asyncio
import dataclasses
from types import SimpleNamespace as Bag

import numpy as np
import pytest
import torch

from agrpo.env import resolve, workflow_context
from agrpo.env.stitch import stitch
from agrpo.env.workflow import GenerationHyperparameters, ModelRequest
from agrpo.env.workflow_player import WorkflowPlayer
from agrpo.env.workflow_tensors import joined
from agrpo.errors import ConfigError, ContractError, RolloutFailure
from agrpo.sampler.vllm import Vllm
from agrpo.sections import Rollout as Settings
from agrpo.types import Group, Prompt, Ragged, Turn
from tests.env import workflow_samples as samples

HEADS = 3


class Words:
    eos_token_id, pad_token_id = 1, 0

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def answer(ids, key, max_tokens=None, truncated=False):
    """A turn of 2 + turn number tokens that depends on everything it was asked with."""
    rng = np.random.default_rng([len(ids), *map(abs, key)])
    num = min(2 + key[2], max_tokens or 99)
    output = np.array([*rng.integers(10, 40, num - 1), 1], np.int32)
    return Turn(
        np.asarray(ids, np.int32), output, -rng.random(num).astype(np.float32), np.ones(num, bool),
        np.full(num, 3, np.int32), rng.integers(0, 40, (num, HEADS)).astype(np.int32),
        -rng.random((num, HEADS)).astype(np.float32),
        Ragged.of([[int(t), 2] for t in output]) if truncated else None, "stop",
    )  # fmt: skip


def player_of(workflow, centering=True, sampler=None, version=lambda: 2, **settings):
    return WorkflowPlayer(
        workflow,
        tokenizer=Words(),
        sampler=sampler or Vllm(max_completion_length=7, num_sampler_logprobs=HEADS),
        max_model_len=64,
        eos_ids=frozenset({1}),
        settings=Settings(**settings),
        centering=centering,
        version=version,
    )


def play(player, level=1, group_id=4, slot=2, truncated=False):
    asked = []

    async def generate(ids, key, max_tokens=None):
        asked.append((list(ids), key, max_tokens))
        await asyncio.sleep(0)
        return answer(ids, key, max_tokens, truncated)

    prompt = Prompt(0, 0, [{"role": "user", "content": "x"}], {"level": level})
    return asyncio.run(player.play(prompt, generate, group_id, slot)), asked


EXAMPLE = {
    "input_ids": torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int32),
    "attention_mask": torch.ones(1, 5, dtype=torch.bool),
    "loss_mask": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
    "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.3, -0.2]], dtype=torch.float32),
    "rewards": torch.tensor([1.0], dtype=torch.float32),
    "versions": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
}


def with_changes(**changes):
    return {k: v for k, v in {**EXAMPLE, **changes}.items() if v is not None}


def test_the_documents_example_is_one_sample():
    rollout, _ = play(player_of(samples.Given(EXAMPLE), centering=False))
    (sample,) = stitch(rollout, 0.5, 4, 2, 1.0)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    np.testing.assert_allclose(sample.sampler_logprobs, [0, 0, -0.5, -0.3, -0.2])
    assert sample.versions[sample.loss_mask].tolist() == [1, 1, 1] and sample.num_trained_tokens == 3
    assert rollout.reward == 1.0 and rollout.turns[0].prompt_ids.tolist() == [1, 2]


def test_a_request_through_the_engine_keeps_head_version_and_seed():
    gconfig = GenerationHyperparameters(max_new_tokens=5)
    rollout, asked = play(player_of(samples.Once(Words(), gconfig)))
    assert asked == [([5, 6, 7], (4, 2, 0), 5)]
    expected = answer([5, 6, 7], (4, 2, 0))
    (sample,) = stitch(rollout, 0.0, 4, 2)
    assert sample.token_ids.tolist() == [5, 6, 7, *expected.output_ids]
    np.testing.assert_array_equal(sample.head_ids, expected.head_ids)
    np.testing.assert_array_equal(sample.head_logprobs, expected.head_logprobs)
    np.testing.assert_array_equal(sample.sampler_logprobs[3:], expected.sampler_logprobs)
    assert sample.versions[3:].tolist() == [3, 3] and rollout.rewards == {"workflow": 2.0}
    assert not rollout.truncated and rollout.completion[0]["content"].endswith(" 1")


def test_two_turns_in_one_row_own_their_heads_and_a_missing_version_is_that_of_the_start():
    rollout, _ = play(player_of(samples.Turns()), level=7)
    (sample,) = stitch(rollout, 0.0, 4, 2)
    first = answer([5, 6], (4, 2, 0))
    second = answer([0] * 6, (4, 2, 1))
    assert sample.num_trained_tokens == 5 and sample.loss_mask[4:6].tolist() == [False, False]
    np.testing.assert_array_equal(sample.head_ids, np.concatenate([first.head_ids, second.head_ids]))
    assert sample.versions[sample.loss_mask].tolist() == [2] * 5 and rollout.reward == 7.0


def test_candidate_sets_follow_their_tokens():
    sampler = Vllm(max_completion_length=7, top_k=2, top_p=0.9, num_sampler_logprobs=HEADS)
    rollout, _ = play(player_of(samples.Turns(), sampler=sampler), truncated=True)
    (sample,) = stitch(rollout, 0.0, 4, 2)
    trained = sample.token_ids[sample.loss_mask]
    assert [sample.candidates[i].tolist() for i in range(5)] == [[int(t), 2] for t in trained]


def test_rows_whose_history_was_cut_find_their_heads_by_their_tokens():
    made = answer([5, 6, 7], (4, 2, 0))
    shortened = {
        "input_ids": np.array([[9, *made.output_ids]]),
        "attention_mask": np.ones((1, 3), bool),
        "loss_mask": np.array([[0, 1, 1]]),
        "logprobs": np.array([[0, *made.sampler_logprobs]], np.float32),
    }

    class Shortened(samples.Once):
        async def arun_episode(self, engine, data):
            await super().arun_episode(engine, data)
            return shortened

    rollout, _ = play(player_of(Shortened(Words(), None)))
    (sample,) = stitch(rollout, 0.0, 4, 2)
    np.testing.assert_array_equal(sample.head_ids, made.head_ids)
    assert rollout.rewards == {} and np.isnan(rollout.reward)


def test_tokens_that_nobody_recorded_cannot_be_centred():
    with pytest.raises(ContractError, match=r"Given: token 2 of row 0 is trained but is in no answer.*set loss=grpo$"):
        play(player_of(samples.Given(EXAMPLE)))
    sampler = Vllm(top_k=5, num_sampler_logprobs=HEADS)
    with pytest.raises(ContractError, match="set sampler.top_k=0 sampler.top_p=1"):
        play(player_of(samples.Given(EXAMPLE), centering=False, sampler=sampler))


def test_interactions_are_rows_in_order_of_creation_with_their_own_rewards():
    rollout, _ = play(player_of(samples.Steps([0.81, 0.9, 1.0], reference=1.0)))
    assert [t.prompt_ids.tolist() for t in rollout.turns] == [[4], [5], [6]]
    np.testing.assert_allclose(rollout.row_offsets, [-0.19, -0.1, 0], atol=1e-12)
    assert rollout.rewards == {"workflow": 1.0} and rollout.has_reference
    found = stitch(rollout, np.array([1.0, 2.0, 3.0]), 4, 2, 1.0 + rollout.row_offsets)
    assert [s.advantage for s in found] == [1.0, 2.0, 3.0]
    assert [round(s.reward, 6) for s in found] == [0.81, 0.9, 1.0]


def test_a_rejected_episode_is_an_unusable_slot():
    with pytest.raises(RolloutFailure, match="returned_none"):
        play(player_of(samples.Steps([1.0])), level=0)


def test_an_interaction_without_tokens_is_an_unusable_slot():
    class Foreign(samples.Steps):
        async def arun_episode(self, engine, data):
            found = await super().arun_episode(engine, data)
            return {k: dataclasses.replace(v, model_response=None) for k, v in found.items()}

    with pytest.raises(RolloutFailure, match="no token data"):
        play(player_of(Foreign([1.0])))


ONES = torch.ones(1, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (7, "Given.arun_episode must return a tensor dictionary, a dictionary of interactions, or None, got int"),
        ({}, "the result lacks input_ids and attention_mask and loss_mask and logprobs"),
        (with_changes(loss_mask=None), "the result lacks loss_mask, which training needs"),
        (with_changes(logprobs=None), "the result lacks logprobs"),
        (with_changes(input_ids=[[1, 2]]), "input_ids must be a tensor or an array, got list"),
        (with_changes(input_ids=torch.ones(5, dtype=torch.int32)), r"input_ids must have the shape \[rows, tokens\].*\[5\]"),
        (with_changes(logprobs=torch.zeros(1, 4)), r"logprobs must have the shape \[1, 5\] of input_ids, got \[1, 4\]"),
        (with_changes(loss_mask=torch.ones(1, 5)), "loss_mask must have an integer or boolean type, expected int32, got float32"),
        (with_changes(input_ids=torch.ones(1, 5)), "input_ids must have an integer"),
        (with_changes(versions=torch.ones(1, 5)), "versions must have an integer"),
        (with_changes(logprobs=ONES), "logprobs must have a floating-point type, expected float32, got int32"),
        (with_changes(rewards=torch.ones(2)), r"rewards must have the shape \[1\], one per row, got \[2\]"),
        (with_changes(rewards=torch.tensor([float("nan")])), "rewards must be finite, got nan"),
        (with_changes(loss_mask=ONES), "loss_mask of row 0 must be 0 on the first token"),
        (with_changes(loss_mask=torch.tensor([[0, 0, 2, 1, 1]])), "loss_mask must hold only 0 and 1, got 0, 1, 2"),
        (with_changes(attention_mask=torch.tensor([[0, 1, 1, 1, 1]])), "attention_mask must be 1 up to the last token"),
        (with_changes(attention_mask=torch.tensor([[1, 1, 1, 1, 0]])), "loss_mask must be 0 where attention_mask is 0"),
        (with_changes(logprobs=torch.full((1, 5), -float("inf"))), "logprobs of row 0 must be finite where loss_mask is 1"),
        (with_changes(logprobs=torch.full((1, 5), 0.5)), "logprobs must not be above 0, got 0.5"),
        (with_changes(versions=-ONES), "versions of row 0 must be at least 0 where loss_mask is 1"),
        (with_changes(extra=torch.ones(3)), r"extra must have one entry per row, \[1, ...\], got the shape \[3\]"),
        (with_changes(rollout_reward=float("inf")), "rollout_reward must be a finite number"),
    ],
)  # fmt: skip
def test_a_broken_contract_names_the_field(result, text):
    with pytest.raises(ContractError, match=text) as caught:
        play(player_of(samples.Given(result), centering=False))
    assert "\n" not in str(caught.value) and "Given" in str(caught.value)


def test_other_widths_are_converted_and_optional_fields_may_miss():
    wide = with_changes(
        input_ids=torch.tensor([[1, 2, 3, 4, 5]]),
        attention_mask=torch.ones(1, 5, dtype=torch.uint8),
        loss_mask=torch.tensor([[False, False, True, True, True]]),
        logprobs=torch.tensor([[0.0, 0.0, -0.5, -0.5, -0.25]], dtype=torch.bfloat16),
        rewards=torch.tensor([1]),
        versions=None,
    )
    rollout, _ = play(player_of(samples.Given(wide), centering=False))
    turn = rollout.turns[0]
    assert turn.output_ids.dtype == np.int32 and turn.versions.tolist() == [2, 2, 2]
    assert turn.sampler_logprobs.tolist() == [-0.5, -0.5, -0.25] and rollout.reward == 1.0


def test_masks_are_looked_at_in_the_first_episodes_only():
    wrong = with_changes(loss_mask=torch.tensor([[0, 0, 2, 1, 1]]))
    rollout, _ = play(player_of(samples.Given(wrong), centering=False, check_format=0))
    assert rollout.turns[0].output_mask.all()


def two_rows(**changes):
    return {k: torch.cat([v, v]) for k, v in EXAMPLE.items()} | changes


def test_reference_rewards():
    differ = torch.tensor([1.0, 2.0])
    with pytest.raises(ContractError, match=r"different rewards \(1, 2\); supply an explicit rollout_reward"):
        play(player_of(samples.Given(two_rows(rewards=differ)), centering=False))
    rollout, _ = play(player_of(samples.Given(two_rows(rewards=differ, rollout_reward=2.0)), centering=False))
    assert rollout.reward == 2.0 and rollout.row_offsets.tolist() == [-1.0, 0.0] and rollout.has_reference
    rollout, _ = play(player_of(samples.Given(two_rows()), centering=False))
    assert rollout.reward == 1.0 and not rollout.has_reference
    with pytest.raises(ContractError, match="rollout_reward of one episode must be finite and equal, got 1, 2"):
        play(player_of(samples.Given(two_rows(rollout_reward=differ)), centering=False))

    class Disagrees(samples.Steps):
        async def arun_episode(self, engine, data):
            found = await super().arun_episode(engine, data)
            for at, interaction in enumerate(found.values()):
                interaction.rollout_reward = float(at)
            return found

    with pytest.raises(ContractError, match="rollout_reward of one episode must be finite and equal, got 0, 1"):
        play(player_of(Disagrees([1.0, 1.0])))


def group_of(*rollouts):
    return Group(4, Prompt(0, 0, [], {}), rollouts, 0)


def test_groups_are_merged_by_type():
    player = player_of(samples.Given(EXAMPLE), centering=False)
    tensors, _ = play(player)
    longer, _ = play(player_of(samples.Given({k: _wider(v) for k, v in EXAMPLE.items()}), centering=False))
    merged = player.merged(group_of(tensors, longer, longer))
    assert merged["input_ids"].shape == (3, 6) and merged["attention_mask"].sum(1).tolist() == [5, 6, 6]
    assert merged["rewards"].tolist() == [1.0, 1.0, 1.0] == merged["original_rewards"].tolist()
    player.check(group_of(tensors, longer))
    steps, _ = play(player_of(samples.Steps([1.0])))
    with pytest.raises(ContractError, match="both tensors and interactions"):
        player.check(group_of(tensors, steps))
    with pytest.raises(ContractError, match="id '2-0' occurs in two episodes"):
        player.check(group_of(steps, steps))
    extra, _ = play(player_of(samples.Given({**EXAMPLE, "mine": torch.ones(1)}), centering=False))
    with pytest.raises(ContractError, match="same fields, got attention_mask, .* and attention_mask, .*mine"):
        player.check(group_of(tensors, extra))


def _wider(tensor):
    return tensor if tensor.ndim == 1 else torch.cat([tensor, tensor[:, -1:]], 1)


def test_joining_pads_on_the_right():
    found = joined([{"a": np.array([[1, 2, 3]])}, {"a": np.array([[4, 5]])}])
    assert found["a"].tolist() == [[1, 2, 3], [4, 5, 0]]
    with pytest.raises(ContractError, match="got a and b"):
        joined([{"a": np.zeros((1, 1))}, {"b": np.zeros((1, 1))}])


def test_every_episode_sees_its_own_context():
    workflow = samples.Contexts()
    player = player_of(workflow)

    async def generate(ids, key, max_tokens=None):
        raise AssertionError

    async def all_at_once():
        plays = [player.play(Prompt(0, 0, [], {}), generate, 7 if s % 2 else -7, s) for s in range(100)]
        return await asyncio.gather(*plays, return_exceptions=True)

    failures = asyncio.run(all_at_once())
    assert all(f.reason == "returned_none" for f in failures) and len(workflow.seen) == 100
    for (task_id, slot), (after, inner, scope) in workflow.seen.items():
        assert after == inner == workflow_context.WorkflowContext(task_id < 0, task_id, slot)
        assert scope == ("eval-rollout" if task_id < 0 else "rollout")
    assert workflow_context.get() == workflow_context.WorkflowContext()
    assert workflow_context.stat_scope() == "rollout"


@pytest.mark.parametrize(
    ("gconfig", "text"),
    [
        ({"temperature": 0.7}, r"gconfig.temperature must be 1.0, the value of this run, got 0.7.*sampler.temperature"),
        ({"n_samples": 4}, "gconfig.n_samples must be 1"),
        (GenerationHyperparameters(greedy=True), "gconfig.greedy must be False"),
        ({"stop": ["\n"]}, "gconfig.stop must be empty"),
        ({"stop_token_ids": [1, 9]}, r"end tokens \[0, 1\], got also \[9\]"),
        ({"max_tokens": 3}, "leaves room for 0 new tokens"),
    ],
)
def test_settings_of_another_distribution_are_refused(gconfig, text):
    with pytest.raises(ContractError, match=text):
        play(player_of(samples.Once(Words(), gconfig)))


def test_settings_that_change_nothing_are_taken():
    for gconfig, limit in (
        ({"top_k": int(1e8), "temperature": 1, "stop_token_ids": [1, 0]}, None),
        ({"max_new_tokens": 500}, 7),
        (GenerationHyperparameters(max_tokens=5).new(n_samples=1), 2),
        (None, None),
    ):
        _, asked = play(player_of(samples.Once(Words(), gconfig)))
        assert asked[0][2] == limit


def config(workflow, kwargs=None):
    return Bag(
        rollout=dataclasses.replace(Settings(), workflow=workflow, workflow_kwargs=kwargs),
        run=Bag(seed=42),
        sampler=Vllm(max_completion_length=7),
        loss=Bag(wants_head=False),
        advantage=Bag(),
    )


HERE = "tests.env.workflow_samples"


@pytest.mark.parametrize(
    ("path", "kwargs", "line"),
    [
        ("Answer", {}, "rollout.workflow: Answer is not an import path"),
        ("tests.nowhere.Answer", {}, "rollout.workflow: tests.nowhere.Answer cannot be imported (ModuleNotFoundError"),
        (f"{HERE}.Onse", {}, "rollout.workflow: tests.env.workflow_samples.Onse: module"),
        (f"{HERE}.Once", None, "rollout.workflow_kwargs must be given for the class"),
        (f"{HERE}.Once", {"scales": 2}, "rollout.workflow_kwargs does not fit"),
        (
            f"{HERE}.Blocking",
            {},
            "rollout.workflow: tests.env.workflow_samples.Blocking.arun_episode must be `async def",
        ),
        (f"{HERE}.Sleeper", None, "rollout.workflow: tests.env.workflow_samples.Sleeper.run must be `async def run"),
        (f"{HERE}.number", None, "rollout.workflow: tests.env.workflow_samples.number is neither a workflow"),
        (f"{HERE}.Needs", None, "rollout.workflow_kwargs does not fit tests.env.workflow_samples.Needs(level)"),
        (None, {}, "rollout.workflow_kwargs needs rollout.workflow"),
    ],
)
def test_what_cannot_be_a_workflow_is_refused_in_one_line(path, kwargs, line):
    (found,) = resolve.problems(config(path, kwargs))
    assert found.startswith(line) and "\n" not in found
    if path:
        with pytest.raises(ConfigError):
            resolve.open_player(config(path, kwargs), Words(), 64, frozenset())


def test_a_class_gets_the_runs_tokenizer_and_settings_and_an_instance_is_used_as_it_is(caplog):
    assert resolve.problems(config(f"{HERE}.Once", {"scale": 3})) == []
    player = resolve.open_player(config(f"{HERE}.Once", {"scale": 3}), Words(), 64, frozenset({1}))
    rollout, asked = play(player)
    assert rollout.reward == 6.0 and asked[0][2] == 7
    for path in (f"{HERE}.Agent", f"{HERE}.ready_made"):
        assert resolve.problems(config(path)) == []
    resolve.open_player(config(f"{HERE}.ready_made", {"a": 1}), Words(), 64, frozenset())
    assert "ignored" in caplog.text
    with pytest.raises(RolloutFailure, match="returned_none"):
        play(resolve.open_player(config(f"{HERE}.ready_made"), Words(), 64, frozenset()))
    assert ModelRequest(input_ids=[1]).rid != ModelRequest(input_ids=[1]).rid

"""A loop of the user's own: each method is called when and with what is documented, and what it may break ends in words."""

import asyncio
import dataclasses
from types import SimpleNamespace as Bag

import msgspec
import numpy as np
import pytest

from agrpo import wire
from agrpo.advantage import Grouped
from agrpo.errors import ContractError, RolloutFailure, StallError
from agrpo.rollout import Rollout, RolloutLoop, TurnRecord, custom, loop_class
from agrpo.rollout.records import Needs, record_of
from agrpo.sampler.vllm import Vllm
from agrpo.scorer import functions
from agrpo.sections import Agent, Run
from agrpo.sections import Rollout as Settings
from agrpo.types import Group, Prompt
from tests.rollout import loop_samples as samples
from tests.rollout.loop_harness import PROMPT_TOKENS, TOKENS, G, Prompts, done, produce, until
from tests.stub_server import control, report


def solved(rows):
    """Rewards of groups: rows that are in `rows` are solved by all rollouts but one, the others by none but one."""
    return lambda group, slot: float(slot < (G - 1 if group % 5 in rows else 1))


def test_the_documented_curriculum_leaves_out_what_is_solved(url, tmp_path):
    loop_config = {"pass_rate_cap": 0.6}
    trainer = produce(
        url, tmp_path, done(25), loop_class=samples.CurriculumRolloutLoop, loop_config=loop_config, reward=solved({1, 3}), cap=3
    )  # fmt: skip
    filtered = [group for group, reason in trainer.resolved if reason == "filtered"]
    assert filtered and {g % 5 for g in filtered} == {1, 3}
    # Both rows were asked in the first epoch, and once they were scored never again.
    asked = [g.group_id for g in trainer.ready if g.group_id % 5 in (1, 3)]
    assert {1, 3} <= set(asked) and max(asked) < 10
    assert trainer.custom.pass_rates[0] == pytest.approx(1 / 3) and trainer.custom.pass_rates[1] == pytest.approx(2 / 3)
    assert trainer.window.get("rollout/skipped_prompt_count") > 0  # sent once a second, so the last ones may be missing


class Filtering(RolloutLoop):
    def __init__(self):
        self.asked = []

    def filter_prompt(self, row_index, row, epoch):
        self.asked.append((row_index, epoch, row["prompt"][0]["content"]))
        return row_index != 2


def test_a_filter_is_asked_once_per_prompt_and_epoch(url, tmp_path):
    trainer = produce(url, tmp_path, done(15), loop_class=Filtering)
    asked = trainer.custom.asked
    assert asked[:12] == [(g % 5, g // 5, str(PROMPT_TOKENS)) for g in range(12)] and len(set(asked)) == len(asked)
    assert {(2, "filtered"), (7, "filtered")} <= set(trainer.resolved)


class Refusing(RolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return epoch == 0


def test_an_epoch_without_any_prompt_ends_the_run_unless_it_is_the_last(url, tmp_path):
    with pytest.raises(StallError, match="Refusing: filter_prompt rejected all 5 prompts of epoch 1"):
        produce(url, tmp_path, done(1000), loop_class=Refusing)
    two = Run(output_dir="x", num_train_epochs=2)

    async def whole(trainer, loop):
        await until(lambda: trainer.num_done >= 10)

    try:
        assert produce(url, tmp_path, whole, loop_class=Refusing, run=two).num_done >= 10
    except StallError as error:  # of an epoch that the run does not have
        assert "epoch 2" in str(error)


class OwnRollouts(RolloutLoop):
    """Two requests per rollout, the second with context of its own; the reward is set here."""

    async def generate_one(self, prompt, tools, group_id=0):
        first = await self.generate_one_turn(self.tokenizer.apply_chat_template(prompt))
        second = await self.generate_one_turn([*first.prompt_ids, *first.output_ids, 9, 9])
        return Rollout(
            completion=[{"role": "assistant", "content": "x"}],
            completion_ids=[4, 4],
            turns=[first, second],
            tool_call_count=2,
            tool_failure_count=1,
            reward=0.25,
        )


def test_a_rollout_of_ones_own_is_trained_token_for_token(url, tmp_path):
    trainer = produce(url, tmp_path, done(4), loop_class=OwnRollouts, reward=lambda g, s: float(s))
    group = trainer.ready[0]
    assert group.source_rewards["points"].tolist() == group.rewards.tolist()  # the scorer here replaces all rewards
    sample = group.samples[0]
    assert len(sample.token_ids) == PROMPT_TOKENS + TOKENS + 2 + TOKENS and sample.num_trained_tokens == 2 * TOKENS
    assert sample.loss_mask[PROMPT_TOKENS + TOKENS : PROMPT_TOKENS + TOKENS + 2].tolist() == [False, False]
    assert sample.versions[sample.loss_mask].tolist() == [1] * 2 * TOKENS and sample.head_ids.shape == (2 * TOKENS, 2)
    bodies = report(url)["seen"]
    seeds = [body["sampling_params"]["seed"] for body in bodies]
    assert len(set(seeds)) == len(seeds) and bodies[0]["sampling_params"]["max_tokens"] == TOKENS
    record = trainer.window.record(1)
    assert record["rollout/turns_mean"] == 2 and record["rollout/samples_per_rollout"] == 1


class OwnTurns(RolloutLoop):
    """The built-in rollout with requests of one's own: here only the first three tokens are kept."""

    async def generate_one_turn(self, prompt_ids):
        record = await super().generate_one_turn(prompt_ids)
        names = ("output_ids", "output_log_probs", "output_sampler_logprobs", "output_versions")
        return dataclasses.replace(record, **{name: getattr(record, name)[:3] for name in names})


class Twice(RolloutLoop):
    """The better of two built-in rollouts."""

    async def generate_one(self, prompt, tools, group_id=0):
        first, second = await super().generate_one(prompt, tools, group_id), await super().generate_one(prompt, tools)
        return max(first, second, key=lambda r: r.completion_ids)


def test_the_built_in_parts_can_be_called_and_changed(url, tmp_path):
    trainer = produce(url, tmp_path, done(3), loop_class=OwnTurns)
    assert all(s.num_trained_tokens == 3 for g in trainer.ready for s in g.samples)
    control(url, seen=[])
    trainer = produce(url, tmp_path, done(3), loop_class=Twice)
    seeds = [body["sampling_params"]["seed"] for body in report(url)["seen"]]
    assert len(set(seeds)) == len(seeds) >= 2 * G * 3
    assert all(s.num_trained_tokens == TOKENS for g in trainer.ready for s in g.samples)


class Advantages(RolloutLoop):
    def __init__(self):
        self.groups = []

    def compute_advantages(self, group):
        self.groups.append(group)
        return 10.0 * super().compute_advantages(group) + 1.0


def test_advantages_of_ones_own_see_every_scored_group_and_save_none(url, tmp_path):
    def reward(group, slot):
        return None if slot == 0 else 1.0 if group % 2 else float(slot)

    trainer = produce(url, tmp_path, done(8), loop_class=Advantages, reward=reward)
    seen = {group.group_id: group for group in trainer.custom.groups}
    assert {g for g, reason in trainer.resolved if reason == "zero_std"} <= set(seen)
    assert all(g % 2 == 0 for g in (r.group_id for r in trainer.ready))
    ready = next(g for g in trainer.ready if g.group_id == 0)
    # Unscorable: 0 whatever was returned. The others: 10 * -1 + 1 and 10 * 1 + 1.
    np.testing.assert_allclose([s.advantage for s in ready.samples], [0, -9, 11], atol=1e-5)
    group = seen[0]
    assert np.isnan(group.rewards[0]) and group.rewards[1:].tolist() == [1, 2]
    lists = ("prompts", "completions", "completions_ids", "completions_sequences", "tool_call_counts", "env_rewards")
    assert all(len(getattr(group, name)) == G for name in lists) and group.rollout_rewards == [None] * G
    assert (group.model_version, group.group_id, group.row_index, group.queued_at > 0) == (1, 0, 0, True)
    sequence = group.completions_sequences[1][0]
    assert sequence.token_ids[PROMPT_TOKENS:] == group.completions_ids[1] and sum(sequence.loss_mask) == TOKENS


class Changed(RolloutLoop):
    def compute_advantages(self, group):
        group.rewards = group.rewards * 0
        return np.ones(len(group.rewards))


def test_groups_are_dropped_by_the_rewards_as_the_function_left_them(url, tmp_path):
    trainer = produce(url, tmp_path, done(4), loop_class=Changed)
    assert not trainer.ready and {reason for _, reason in trainer.resolved} == {"zero_std"}


class Keeper(samples.Typed):
    closed = False

    async def close(self):
        self.closed = True


def test_the_state_goes_into_checkpoints_and_comes_back(url, tmp_path):
    async def scenario(trainer, loop):
        await until(lambda: len(trainer.ready) >= 5)
        trainer.listener.send(wire.AskState())
        await until(lambda: trainer.states)

    trainer = produce(url, tmp_path, scenario, loop_class=Keeper, reward=solved({1}), cap=3)
    state = msgspec.msgpack.decode(trainer.states[0], strict=False)
    assert state["rates"][0] == pytest.approx(1 / 3) and state["newest"] == 0.5 and trainer.custom.closed
    start = wire.Start(
        3, 4, [], [], 0, 0, 10_000, loop_state=msgspec.msgpack.encode({"rates": {1: 1.0}, "newest": 0.5})
    )
    again = produce(url, tmp_path, done(5), loop_class=Keeper, start=start)
    assert (1, "filtered") in again.resolved
    assert produce(url, tmp_path, scenario, loop_class=Advantages).states == [None]


class Raises(RolloutLoop):
    where = ""

    async def setup(self):
        self.fail("setup")

    def filter_prompt(self, row_index, row, epoch):
        return self.fail("filter_prompt") or True

    def compute_advantages(self, group):
        self.fail("compute_advantages")
        return super().compute_advantages(group)

    def state_dict(self):
        return {object()} if self.where == "state_dict" else None

    def fail(self, name):
        if name == self.where:
            raise KeyError("mine")


@pytest.mark.parametrize("where", ["setup", "filter_prompt", "compute_advantages"])
def test_what_raises_outside_of_rollouts_ends_the_run_by_name(url, tmp_path, where):
    cls = type("Raises", (Raises,), {"where": where})
    with pytest.raises(ContractError, match=f"rollout.loop: Raises: {where} raised KeyError: 'mine'"):
        produce(url, tmp_path, done(1000), loop_class=cls)


class Short(RolloutLoop):
    def compute_advantages(self, group):
        return [1.0]


class Unstorable(RolloutLoop):
    def state_dict(self):
        return {"client": object()}


def test_wrong_results_end_the_run_in_one_line(url, tmp_path):
    with pytest.raises(ContractError, match="Short.compute_advantages must return 3 values"):
        produce(url, tmp_path, done(1000), loop_class=Short)

    async def asks(trainer, loop):
        trainer.listener.send(wire.AskState())
        await until(lambda: False)

    with pytest.raises(ContractError, match="Unstorable: state_dict must give plain values: object is no number"):
        produce(url, tmp_path, asks, loop_class=Unstorable)


class Sometimes(RolloutLoop):
    def __init__(self):
        self.num = 0

    async def generate_one(self, prompt, tools, group_id=0):
        self.num += 1
        if self.num == 1:
            raise OSError("my own service is down")
        return await super().generate_one(prompt, tools, group_id)


def test_what_raises_in_a_rollout_costs_that_rollout(url, tmp_path):
    trainer = produce(url, tmp_path, done(3), loop_class=Sometimes, cap=1)
    assert trainer.window.record(1)["rollout/failed_error_count"] == 1
    assert next(g for g in trainer.ready if g.group_id == 0).rollout_indices.tolist() == [1, 2]


class Hangs(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        if group_id == 0:
            await asyncio.Event().wait()
        return await super().generate_one(prompt, tools, group_id)


def test_a_rollout_that_hangs_is_given_up(url, tmp_path):
    async def until_given_up(trainer, loop):
        await until(lambda: trainer.resolved and trainer.ready, 30)

    limits = {"agent": Agent(time_limit=1.0), "max_failure_frac": 1.0}
    trainer = produce(url, tmp_path, until_given_up, loop_class=Hangs, **limits)
    assert trainer.resolved == [(0, "unusable")] and trainer.ready
    assert trainer.window.record(1)["rollout/failed_timeout_count"] == G


def test_a_reward_function_gets_the_ids_that_the_rollout_names():
    played = Needs(2, False).rollout(Rollout([], [3, 4], [record()]), 0, "here", frozenset())
    group = Group(0, Prompt(0, 0, [], {}), (played,), 0)
    assert functions._request(group, [played]).completion_ids[0].tolist() == [3, 4]


def record(**changes):
    made = TurnRecord([5, 6], [7, 8], [-0.5, -0.25], output_sampler_logprobs=[{7: -0.5, 9: -1.0}, {8: -0.25}])
    return dataclasses.replace(made, **changes)


def test_a_record_becomes_a_turn_and_back():
    turn = Needs(2, False).turn(record(), 3, "here")
    assert turn.head_ids.tolist() == [[7, 9], [8, 0]] and turn.head_logprobs[1, 1] == -np.inf
    assert turn.versions.tolist() == [3, 3] and turn.output_mask.all() and turn.candidates is None
    assert record_of(turn) == record(output_versions=[3, 3])
    context = TurnRecord([5], [7, 8], output_mask=[0, 0])
    assert Needs(2, False).turn(context, 3, "here").sampler_logprobs.tolist() == [0, 0]
    truncated = Needs(0, True).turn(record(output_sampling_mask=[[7, 9], [8]], output_mask=[1, 0]), 3, "here")
    assert truncated.candidates[0].tolist() == [7, 9] and truncated.output_mask.tolist() == [True, False]
    assert record_of(truncated).output_sampling_mask == [[7, 9], [8]] and record_of(truncated).output_mask == [1, 0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (record(output_mask=[1]), "here.output_mask must have 2 entries, one per output token, got 1"),
        (
            record(output_log_probs=[]),
            "here.output_log_probs must have 2 entries, one per output token, got 0; they are needed",
        ),
        (record(output_log_probs=[0.0, float("nan")]), "here.output_log_probs must be finite"),
        (
            record(output_sampler_logprobs=None),
            "output_sampler_logprobs is missing for trained tokens.*or set loss=grpo",
        ),
        (record(output_sampler_logprobs=[{}, {8: -1.0}]), "output_sampler_logprobs is missing"),
        (record(output_sampling_mask=[[7], [8]]), "output_sampling_mask is given, but sampler.top_k=0"),
        (record(output_ids=[1.5, 2.5]), "here.output_ids must be a list of token ids"),
        ({"output_ids": [1]}, "here must be a TurnRecord, got dict"),
    ],
)
def test_a_record_that_breaks_its_contract_names_the_field(given, text):
    with pytest.raises(ContractError, match=text):
        Needs(2, False).turn(given, 0, "here")


def test_truncated_sampling_needs_candidates():
    with pytest.raises(ContractError, match="output_sampling_mask is missing; with sampler.top_k > 0"):
        Needs(0, True).turn(record(), 0, "here")


def test_a_token_outside_its_own_candidate_set_makes_the_rollout_unusable():
    with pytest.raises(RolloutFailure, match=r"output_sampling_mask\[1\] lacks the token sampled there, 8") as failure:
        Needs(0, True).turn(record(output_sampling_mask=[[7, 9], [9]]), 0, "here")
    assert failure.value.reason == "candidates"


@pytest.mark.parametrize("reward", [float("nan"), True, "1"])
def test_a_reward_that_is_no_number_ends_the_run(reward):
    with pytest.raises(ContractError, match="Rollout.reward must be a finite number or None"):
        Needs(2, False).rollout(Rollout([], [], [record()], reward=reward), 0, "here", frozenset())
    with pytest.raises(ContractError, match="here must return a Rollout, got int"):
        Needs(2, False).rollout(7, 0, "here", frozenset())
    played = Needs(2, False).rollout(Rollout([], [3], [record()], reward=2), 0, "here", frozenset({8}))
    assert played.rewards == {"rollout": 2.0} and not played.truncated and played.extras["completion_ids"] == [3]


HERE = "tests.rollout.loop_samples"


def config(loop, loop_config=None, advantage=None, workflow=None):
    rollout = dataclasses.replace(Settings(), loop=loop, loop_config=loop_config or {}, workflow=workflow)
    return Bag(rollout=rollout, advantage=advantage or Grouped(), sampler=Vllm())


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (config("tests.nowhere.Loop"), "rollout.loop: tests.nowhere.Loop cannot be imported (ModuleNotFoundError"),
        (config(f"{HERE}.Hidden"), "rollout.loop: tests.rollout.loop_samples.Hidden is defined inside a function"),
        (config(f"{HERE}.anonymous"), "rollout.loop: tests.rollout.loop_samples.anonymous is a lambda"),
        (config(f"{HERE}.Unrelated"), "rollout.loop: tests.rollout.loop_samples.Unrelated must be a subclass of agrpo.rollout"),
        (config(f"{HERE}.NeedsArgument"), "rollout.loop: tests.rollout.loop_samples.NeedsArgument is made without arguments"),
        (config(f"{HERE}.NotAsync"), "rollout.loop: tests.rollout.loop_samples.NotAsync.setup must be a coroutine: async def"),
        (config(f"{HERE}.AsyncFilter"), "rollout.loop: tests.rollout.loop_samples.AsyncFilter.filter_prompt must be a plain"),
        (config(f"{HERE}.OddConfig"), "rollout.loop: OddConfig.Config must be a dataclass"),
        (config(f"{HERE}.Typed", {"pass_rate": 1}), "rollout.loop_config.pass_rate is not a key"),
        (config(f"{HERE}.Typed", {"pass_rate_cap": "high"}), "rollout.loop_config.pass_rate_cap must be a number, got 'high'"),
        (config(None, {"a": 1}), "rollout.loop_config needs rollout.loop"),
        (config(f"{HERE}.OneTurn", workflow="my.Flow"), "rollout.workflow and tests.rollout.loop_samples.OneTurn.generate_one"),
        (config(f"{HERE}.Typed", advantage=Grouped(std_level="batch")), "tests.rollout.loop_samples.Typed.compute_advantages"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_loop_is_refused_in_one_line(made, line):
    (found,) = loop_class.problems(made)
    assert found.startswith(line) and "\n" not in found


def test_settings_of_a_loop_are_read_by_name():
    own = custom.Settings({"a": 1}, Bag(rollout=Bag(group_size=7)))
    assert own.a == 1 and own.rollout.group_size == 7
    with pytest.raises(AttributeError, match="give it as rollout.loop_config.b=VALUE"):
        _ = own.b
    assert loop_class.problems(config(f"{HERE}.Typed", {"pass_rate_cap": 0.5})) == []
    assert loop_class.problems(config(f"{HERE}.CurriculumRolloutLoop", {"anything": 1})) == []
    assert loop_class.problems(config(None)) == [] and len(Prompts()) == 5

"""Environments: lent to one rollout at a time, reset, asked for a reward, discarded where they fail (ENV-1 to ENV-17)."""

import asyncio
import gc
import math

import env_samples
import pytest
from env_chat import Scripted, call, make_tokenizer
from env_samples import AsyncEnv, made

from agrpo.data.prompts import EndlessPrompts
from agrpo.env.conversation import Conversation
from agrpo.env.player import group_seed, with_observation
from agrpo.errors import ConfigError, RolloutFailure
from agrpo.metrics.window import Window
from agrpo.rollout.report import record_played
from agrpo.sampler.vllm import Vllm
from agrpo.types import Group, Prompt

TWO = {"count": "env_samples.IncrementEnv", "ask": "env_samples.AsyncEnv"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def fresh():
    made.clear()
    env_samples.alive.clear()


def row(content="Go.", **columns):
    return Prompt(3, 0, [{"role": "user", "content": content}] if content else [], columns)


def play(tokenizer, *plays, **settings):
    """Rollouts one after the other by one player: (prompt, texts) each; failures as they come."""

    async def run():
        player = Conversation(**settings).open(tokenizer, Vllm(), 4099, run_seed=7)
        found = []
        for number, (prompt, texts) in enumerate(plays):
            model = Scripted(tokenizer, texts)
            try:
                found.append((await player.play(prompt, model, number // 2, number % 2), model))
            except RolloutFailure as failure:
                found.append((failure, model))
        await player.close()
        return found

    return asyncio.run(run())


def test_the_documents_environment_is_reset_played_and_rewarded(tokenizer):
    steps = [call("increment", step=2), call("increment", step="2"), "Done."]
    wins = (row(target=4, other="x"), steps)
    loses = (row(target=5), ["No."])
    (won, model), (lost, _) = play(tokenizer, wins, loses, factory="env_samples.IncrementEnv")
    assert won.rewards == {"IncrementEnv": 1.0} and lost.rewards == {"IncrementEnv": 0.0}
    assert [m["content"] for m in won.completion if m["role"] == "tool"] == ["2", "4"]
    assert "Go. The target is 4." in model.asked[0][0] and "increment" in model.asked[0][0]
    assert "_private" not in model.asked[0][0] and "get_reward" not in model.asked[0][0]
    assert won.prompt == [{"role": "user", "content": "Go. The target is 4."}]
    assert len(made) == 1 and made[0].uses == 2  # one constructor for rollouts one after the other
    assert {"env/reset_s", "env/reward_s"} <= {name for name, _, _ in won.measured}


def test_reset_gets_the_rows_columns_and_with_a_mapping_not_the_route(tokenizer):
    said = [call("increment", step=1), "x"]
    play(tokenizer, (row(target=1, environment="count", level=3), said), factory=TWO)
    assert made[0].columns.keys() == {"target", "level", "prompt"}
    play(tokenizer, (row(target=1, environment="count"), said), factory="env_samples.IncrementEnv")
    assert made[1].columns["environment"] == "count"


def test_a_row_of_a_mapping_sees_the_tools_of_its_environment_only(tokenizer):
    asks = (row("", environment="ask"), [call("ask", question="abc"), call("increment", step=1), "x"])
    ((rollout, model),) = play(tokenizer, asks, factory=TWO, tools=["env_samples.multiply"], pass_group_seed=False)
    assert "multiply" in model.asked[0][0] and "increment" not in model.asked[0][0]
    answers = [m["content"] for m in rollout.completion if m["role"] == "tool"]
    assert answers[0] == "cba" and "there is no tool increment" in answers[1]
    assert rollout.rewards == {"AsyncEnv": 0.25}


def test_an_unknown_environment_makes_the_rollout_unusable_and_is_refused_in_a_map(tokenizer):
    ((failure, _),) = play(tokenizer, (row(environment="chess"), ["x"]), factory=TWO)
    assert failure.reason == "unknown_environment" and "chess" in failure.text
    player = Conversation(factory=TWO).open(tokenizer, Vllm(), 64)
    with pytest.raises(ConfigError, match="no environment chess, go, which"):
        player.check_rows([{"environment": "count"}, {"environment": "go"}, {"environment": "chess"}])


def test_an_environment_without_data_gives_the_prompt_and_shares_a_seed_per_group(tokenizer):
    prompts = EndlessPrompts()
    plays = [(prompts.prompt_of(n), ["x"]) for n in range(4)]
    found = play(tokenizer, *plays, factory="env_samples.AsyncEnv", pass_group_seed=True)
    starts = [model.asked[0][0] for _, model in found]
    assert starts[0] == starts[1] != starts[2] == starts[3]
    assert f"Say {group_seed(7, 0)}." in starts[0]
    assert (AsyncEnv.entered, AsyncEnv.left) != (0, 0) and AsyncEnv.entered == AsyncEnv.left


@pytest.mark.parametrize(
    ("how", "content", "reason"),
    [
        ("raise", "Go.", "env_reset"),
        ("number", "Go.", "env_reset"),
        ("reward", "Go.", "env_reward"),
        ("nan", "Go.", "env_reward"),
        ("fine", "", "no_prompt"),
    ],
)
def test_what_fails_in_an_environment_makes_its_own_rollout_unusable(tokenizer, how, content, reason):
    plays = [(row(content, how=how), ["x"]), (row(how="fine"), ["x"])]
    (failure, _), (rollout, _) = play(tokenizer, *plays, factory="env_samples.BrokenEnv")
    assert failure.reason == reason
    assert rollout.rewards == {"BrokenEnv": 1.0}


@pytest.mark.parametrize(
    ("how", "texts", "times_made"), [("raise", ["x"], 2), ("fine", ["x"], 1), ("reward", ["x"], 2)]
)
def test_an_instance_that_failed_is_not_lent_again(tokenizer, monkeypatch, how, texts, times_made):
    count = []
    monkeypatch.setattr(env_samples.BrokenEnv, "__init__", lambda self: count.append(1))
    play(tokenizer, (row(how=how), texts), (row(how="fine"), ["x"]), factory="env_samples.BrokenEnv")
    assert len(count) == times_made


def test_an_instance_whose_tool_took_too_long_is_not_lent_again(tokenizer, monkeypatch):
    count = []
    monkeypatch.setattr(env_samples.BrokenEnv, "__init__", lambda self: count.append(1))
    plays = [(row(how="fine"), [call("slow", seconds=0.5), "x"]), (row(how="fine"), ["x"])]
    (first, _), _ = play(tokenizer, *plays, factory="env_samples.BrokenEnv", tool_timeout=0.05)
    assert first.tool_failure_count == 1 and len(count) == 2


def test_instances_are_made_per_rollout_where_reuse_is_off(tokenizer):
    plays = [(row(target=1), ["x"])] * 3
    play(tokenizer, *plays, factory="env_samples.make_env", reuse_instances=False)
    assert len(made) == 3


def test_parallel_rollouts_never_share_an_instance_and_no_more_are_made_than_needed(tokenizer):
    async def run():
        player = Conversation(factory="env_samples.IncrementEnv").open(tokenizer, Vllm(), 4099)
        for _ in range(2):
            texts = [call("increment", step=1), call("increment", step=2), "x"]
            plays = [player.play(row(target=3), Scripted(tokenizer, texts), 0, i) for i in range(67)]
            rollouts = await asyncio.gather(*plays)
            assert all(r.rewards == {"IncrementEnv": 1.0} for r in rollouts)
        await player.close()

    asyncio.run(run())
    assert len(made) <= 67 and sum(env.uses for env in made) == 134


def test_a_slow_reset_delays_its_own_rollout_only(tokenizer):
    async def run():
        player = Conversation(factory="env_samples.SlowEnv").open(tokenizer, Vllm(), 4099)
        slow = asyncio.create_task(player.play(row(seconds=1.0), Scripted(tokenizer, ["x"]), 0, 0))
        await asyncio.sleep(0.01)
        await asyncio.gather(*[player.play(row(), Scripted(tokenizer, ["x"]), 1, i) for i in range(23)])
        assert not slow.done()
        await slow
        await player.close()

    asyncio.run(run())


def test_a_cancelled_rollout_does_not_give_its_instance_back(tokenizer):
    async def run():
        player = Conversation(factory="env_samples.SlowEnv").open(tokenizer, Vllm(), 4099)
        task = asyncio.create_task(player.play(row(seconds=0.3), Scripted(tokenizer, ["x"]), 0, 0))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (pool,) = player._pools.values()
        assert pool.idle == [] and pool.num_made == 1
        await player.close()

    asyncio.run(run())
    gc.collect()


def test_what_reset_says_goes_behind_the_last_user_message():
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert with_observation(history, "!") == [{"role": "user", "content": "a!"}, history[1]]
    blocks = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert with_observation(blocks, "!")[0]["content"][-1] == {"type": "text", "text": "!"}
    assert with_observation([{"role": "system", "content": "s"}], "!")[1] == {"role": "user", "content": "!"}
    assert history[0]["content"] == "a"


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("env_samples.NoResetEnv", "env.factory: env_samples.NoResetEnv has no method reset"),
        ("env_samples.UndocumentedEnv", "env_samples.UndocumentedEnv: method move has no docstring"),
        ("env_samples.nameless", "is a lambda"),
        ("env_samples.needs_argument", "needs the argument size"),
        ("env_samples.alive", "is of type set"),
        ({"a": "env_samples.nothing"}, "env.factory.a: env_samples.nothing"),
        ({}, "is an empty mapping"),
        (7, "must be the import path"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_in_one_line(tokenizer, factory, words):
    with pytest.raises(ConfigError) as error:
        Conversation(factory=factory).open(tokenizer, Vllm(), 64)
    assert any(words in line for line in error.value.problems)
    assert all("\n" not in line for line in error.value.problems)


def test_a_method_and_a_tool_of_one_name_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(env_samples.IncrementEnv, "multiply", env_samples.IncrementEnv.increment, raising=False)
    monkeypatch.setattr(env_samples, "increment", env_samples.multiply, raising=False)
    both = Conversation(factory="env_samples.IncrementEnv", tools=["env_samples.multiply"])
    with pytest.raises(ConfigError, match="multiply is also a method of IncrementEnv"):
        both.open(tokenizer, Vllm(), 64)


def test_every_figure_of_a_play_is_a_declared_metric(tokenizer):
    """What the rollouts measured reduces to the documented ratios, those without a call included."""
    said = [call("increment", step=1) + "\n" + call("lost"), "x"]
    plays = [(row(target=1), said), (row(target=2), ["No."])]
    (first, _), (second, _) = play(tokenizer, *plays, factory="env_samples.IncrementEnv")
    window = Window(strict=True)
    record_played(window, Group(0, row(), (first, second), 1), 2)
    record = window.record(1)
    expected = {
        "tools/call_frequency": 1.0,
        "tools/failure_frequency": 0.5,
        "tools/increment/call_count": 1,
        "tools/increment/failure_count": 0,
        "tools/unknown_name_count": 1,
        "tools/parallel_calls_mean": 2,
        "tools/loop_exhausted_frac": 0,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["env/reset_s"] > 0 and record["env/reward_s"] > 0 and record["tools/latency_s"] > 0
    record_played(window, Group(0, row(), (second,), 1), 1)
    assert math.isnan(window.record(2)["tools/failure_frequency"])  # a window without calls


def test_rewards_see_the_prompt_that_the_environment_made(tokenizer):
    from agrpo.scorer.contract import keywords
    from agrpo.scorer.functions import _request

    ((rollout, _),) = play(tokenizer, (row(target=4), ["x"]), factory="env_samples.IncrementEnv")
    group = Group(0, row(target=4), (rollout,), 1)
    assert keywords(_request(group, group.usable))["prompts"] == [[{"role": "user", "content": "Go. The target is 4."}]]

"""Agents as players: the real client library and a real framework against the proxy; answers are scripted token ids."""

import asyncio
import contextvars
import dataclasses
import math
import re
import time
from pathlib import Path

import numpy as np
import openai
import pytest
from scripted_model import MAX_MODEL_LEN, Scripted, make_tokenizer

from agrpo.advantage import Grouped
from agrpo.env.agent import AgentPlayer
from agrpo.env.agent_export import discounted, in_conversations
from agrpo.env.joined import joined
from agrpo.env.stitch import chains, stitch
from agrpo.errors import ConfigError, ContractError, RolloutFailure
from agrpo.sampler.vllm import Vllm
from agrpo.sections import Agent
from agrpo.sections import Rollout as Settings
from agrpo.types import Group, Prompt

DOCS = Path(__file__).parents[2] / "docs/agents.md"
PROMPT = Prompt(0, 0, [{"role": "user", "content": "What is 2 + 3?"}], {"answer": "5"})


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def play(tokenizer, agent, *script, prompt=PROMPT, ends=True, **settings):
    """The rollout of one play; or what it raised."""

    async def run():
        section = dataclasses.replace(Settings(), agent=Agent(**settings))
        options = {"sampler": Vllm(), "max_model_len": MAX_MODEL_LEN, "eos_ids": frozenset()}
        player = AgentPlayer(agent, tokenizer=tokenizer, settings=section, **options)
        await player.start()
        try:
            return await player.play(prompt, Scripted(tokenizer, *script, ends=ends), 3, 1)
        finally:
            await player.close()

    return asyncio.run(run())


def api_of(extra, **options):
    names = ("base_url", "api_key", "http_client")
    return openai.AsyncOpenAI(**{name: extra[name] for name in names}, **{"max_retries": 0, **options})


class Talker:
    """Asks `num_turns` times, each after the answers before it; `judge` makes what `run` returns."""

    def __init__(self, judge=lambda answers, data: 1.0, num_turns=1):
        self.judge, self.num_turns = judge, num_turns

    async def run(self, data, **extra):
        api, messages, answers = api_of(extra), list(data["messages"]), []
        for _ in range(self.num_turns):
            answers.append(await api.chat.completions.create(model="m", messages=messages))
            messages += [answers[-1].choices[0].message, {"role": "user", "content": "And 4 + 4?"}]
        return self.judge(answers, data)


def test_one_run_of_the_agent_is_one_rollout(tokenizer):
    judge = lambda answers, data: answers[0].choices[0].message.content == data["answer"]  # noqa: E731
    rollout = play(tokenizer, Talker(lambda *a: int(judge(*a)), num_turns=2), "5", "8")
    assert rollout.rewards == {"agent": 1.0} and rollout.failure is None and not rollout.truncated
    assert [m["content"] for m in rollout.completion] == ["5", "And 4 + 4?", "8"]
    assert [len(chain) for chain in chains(rollout.turns)] == [2]
    assert [t.versions[0] for t in rollout.turns] == [1, 2]


def test_an_answer_that_was_cut_off_makes_a_truncated_rollout(tokenizer):
    assert play(tokenizer, Talker(), "5", ends=False).truncated


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(2)])
def test_any_finite_number_is_a_reward(tokenizer, value):
    assert play(tokenizer, Talker(lambda *_: value), "5").rewards == {"agent": float(value)}


def test_an_agent_without_a_reward_of_its_own_leaves_it_to_the_reward_functions(tokenizer):
    rollout = play(tokenizer, Talker(lambda *_: None), "5")
    assert rollout.rewards == {} and math.isnan(rollout.reward)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, "1", [1.0], {"other": 1.0}, np.bool_(True)])
def test_anything_else_breaks_the_contract(tokenizer, value):
    with pytest.raises(ContractError, match="Talker.run"):
        play(tokenizer, Talker(lambda *_: value), "5")


@pytest.mark.parametrize("value", [False, math.nan, None])
def test_a_mapping_holds_finite_numbers(tokenizer, value):
    with pytest.raises(ContractError, match="chatcmpl-"):
        play(tokenizer, Talker(lambda answers, _: {answers[0].id: value}), "5")


def test_rewards_after_an_answer_count_for_it_with_the_discount():
    assert discounted([None, None, 1.0], 0.9) == pytest.approx([0.81, 0.9, 1.0])
    assert discounted([0.5, None, 2.0], 1.0) == [2.5, 2.0, 2.0]
    assert discounted([0.5, 0.25], 0.0) == [0.5, 0.25]


def score(tokenizer, rollout):
    """(decoded row, trained text, row reward, advantage) against a second rollout of reward 0, eps 0."""
    other = dataclasses.replace(rollout, turns=rollout.turns[:1], row_offsets=None, rewards={"agent": 0.0})
    scores = Grouped(eps=0.0).scores(Group(0, PROMPT, (rollout, other), 0), 2048)
    advantages = Grouped(eps=0.0).of_rows(scores)[: scores.row_counts[0]]
    samples = stitch(rollout, advantages, 0, 0, scores.rows[: scores.row_counts[0]])
    return [
        (tokenizer.decode(s.token_ids), tokenizer.decode(s.token_ids[s.loss_mask]), s.reward, s.advantage)
        for s in samples
    ]


def test_individual_export_makes_a_row_of_each_answer_with_its_discounted_reward(tokenizer):
    agent = Talker(lambda *_: 1.0, num_turns=3)
    rollout = play(tokenizer, agent, "5", "8", "9", export_style="individual", turn_discount=0.9)
    rows = score(tokenizer, rollout)
    assert [trained for _, trained, _, _ in rows] == ["5<|im_end|>", "8<|im_end|>", "9<|im_end|>"]
    assert rows[2][0].startswith(rows[1][0]) and rows[1][0].startswith(rows[0][0])
    assert [r[2] for r in rows] == pytest.approx([0.81, 0.9, 1.0])
    assert [r[3] for r in rows] == pytest.approx([0.62, 0.8, 1.0])  # (reward - 0.5) / 0.5: references 1 and 0
    assert rollout.rewards == {"agent": 1.0}


def test_concatenated_export_gives_a_conversation_the_reward_of_its_last_answer(tokenizer):
    agent = Talker(lambda *_: 1.0, num_turns=3)
    (row,) = score(tokenizer, play(tokenizer, agent, "5", "8", "9", turn_discount=0.9))
    assert row[1:] == ("5<|im_end|>8<|im_end|>9<|im_end|>", 1.0, 1.0)


def test_conversations_of_one_rollout_keep_rewards_of_their_own(tokenizer):
    class Judged(TwoVoices):
        judge = staticmethod(lambda ids: {ids[2]: 0.25, ids[3]: 1.0})

    rollout = play(tokenizer, Judged(), "a", "b", "c", "d", turn_discount=0.0)
    rows = score(tokenizer, rollout)
    assert [(r[1], r[2]) for r in rows] == [("a<|im_end|>c<|im_end|>", 0.25), ("b<|im_end|>d<|im_end|>", 1.0)]
    assert [r[3] for r in rows] == pytest.approx([-0.5, 1.0])


def test_a_joined_chain_trains_the_same_tokens_as_its_turns(tokenizer):
    rollout = play(tokenizer, Talker(num_turns=3), "5", "8", "9")
    one = dataclasses.replace(rollout, turns=(joined(list(rollout.turns)),))
    (expected,), (found,) = stitch(rollout, 1.0, 0, 0), stitch(one, 1.0, 0, 0)
    for name in ("token_ids", "loss_mask", "sampler_logprobs", "versions", "head_ids", "head_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


class Odd:
    async def run(self, data, **extra):
        raise NotImplementedError


class Raising(Odd):
    async def run(self, data, **extra):
        raise ValueError("cannot read it")


class Exiting(Odd):
    async def run(self, data, **extra):
        raise SystemExit(3)


class Cancelling(Odd):
    async def run(self, data, **extra):
        raise asyncio.CancelledError


class Idle(Odd):
    async def run(self, data, **extra):
        return 1.0


class Hanging(Odd):
    async def run(self, data, **extra):
        await api_of(extra).chat.completions.create(model="m", messages=data["messages"])
        await asyncio.sleep(60)


class Blocking(Odd):
    async def run(self, data, **extra):
        time.sleep(1.5)


@pytest.mark.parametrize(
    "agent, error, text",
    [
        (Raising(), ValueError, "cannot read it"),
        (Exiting(), RolloutFailure, "SystemExit"),
        (Cancelling(), RolloutFailure, "cancelled itself"),
        (Idle(), RolloutFailure, "no_request"),
        (Hanging(), RolloutFailure, r"agent_timeout.*rollout.agent.time_limit=0.2 s$"),
        (Blocking(), RolloutFailure, r"agent_timeout.*test_env_agent.py:\d+ in run: use await"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_goes_wrong_in_an_agent_is_the_failure_of_its_rollout(tokenizer, agent, error, text):
    with pytest.raises(error, match=text):
        play(tokenizer, agent, "5", time_limit=0.2 if isinstance(agent, Hanging | Blocking) else 20)


def test_a_failed_generation_is_the_reason_and_not_what_the_agent_made_of_it(tokenizer):
    with pytest.raises(RolloutFailure) as failure:
        play(tokenizer, Talker(), RolloutFailure("unavailable", "no server"))
    assert failure.value.reason == "unavailable"


def test_a_fault_of_the_program_itself_is_shown_as_such(tokenizer):
    with pytest.raises(ZeroDivisionError):
        play(tokenizer, Talker(), ZeroDivisionError("here"))


class Sync(Odd):
    """The blocking client, as many agents are written; it must not stop the server that answers it."""

    async def run(self, data, base_url, api_key):
        api = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        return float(api.chat.completions.create(model="m", messages=data["messages"]).choices[0].message.content)


def test_a_blocking_client_is_answered_and_run_gets_only_what_it_takes(tokenizer):
    assert play(tokenizer, Sync(), "5").rewards == {"agent": 5.0}


WHO = contextvars.ContextVar("who", default="nobody")


class Context(Odd):
    async def run(self, data, **extra):
        await api_of(extra).chat.completions.create(model="m", messages=data["messages"])
        return float(WHO.get() == "me")


def test_an_agent_sees_the_context_variables_of_its_rollout(tokenizer):
    WHO.set("me")
    assert play(tokenizer, Context(), "5").reward == 1.0


class Scribbling(Odd):
    async def run(self, data, **extra):
        data["messages"][0]["content"] = "changed"
        data["notes"].append(1)
        await api_of(extra).chat.completions.create(model="m", messages=data["messages"])
        return 1


def test_an_agent_may_change_its_data(tokenizer):
    prompt = dataclasses.replace(PROMPT, columns={"notes": []})
    play(tokenizer, Scribbling(), "5", prompt=prompt)
    assert prompt.columns == {"notes": []} and prompt.messages[0]["content"] == "What is 2 + 3?"


class Asking(Odd):
    async def run(self, data, **extra):
        messages = [{"role": "user", "content": data["question"]}]
        await api_of(extra).chat.completions.create(model="m", messages=messages)
        return 1


def test_a_row_needs_no_prompt(tokenizer):
    rollout = play(tokenizer, Asking(), "5", prompt=Prompt(0, 0, [], {"question": "What is 2 + 3?"}))
    assert rollout.completion == [{"role": "assistant", "content": "5"}]
    options = {"sampler": Vllm(), "max_model_len": MAX_MODEL_LEN, "eos_ids": frozenset(), "settings": Settings()}
    player = AgentPlayer(Asking(), tokenizer=tokenizer, **options)
    assert len(player.render([])) == 0 < len(player.render(PROMPT.messages))


class TwoVoices(Odd):
    """Two conversations that alternate."""

    judge = staticmethod(lambda ids: 1)

    async def run(self, data, **extra):
        ids = []
        api, talks = api_of(extra), [[{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]]
        for _ in range(2):
            for messages in talks:
                answer = await api.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
                ids.append(answer.id)
        return self.judge(ids)


def test_conversations_that_alternate_are_one_sample_each(tokenizer):
    rollout = play(tokenizer, TwoVoices(), "a", "b", "c", "d")
    said = [[tokenizer.decode(t.output_ids, skip_special_tokens=True) for t in c] for c in chains(rollout.turns)]
    assert said == [["a", "c"], ["b", "d"]]


def test_an_answer_that_two_go_on_from_is_trained_once(tokenizer):
    class Node:
        def __init__(self, parent=None):
            self.parent = parent

    root = Node()
    left, right = Node(root), Node(root)
    leaf = Node(left)
    assert in_conversations([root, left, right, leaf]) == [root, left, leaf, right]


class Plain:
    def run(self, data, **extra):
        return 1.0


def test_a_class_without_async_run_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="async def run"):
        play(tokenizer, Plain())


def test_the_example_of_the_documentation_plays(tokenizer):
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.S)[1]
    module = {}
    exec(code, module)
    rollout = play(tokenizer, module["SecondTry"](), "6", "5")
    assert rollout.rewards == {"agent": 0.5} and [len(chain) for chain in chains(rollout.turns)] == [2]


class PydanticAgent:
    """A tool loop of pydantic-ai, driven through its own OpenAI provider."""

    async def run(self, data, base_url, api_key, http_client):
        from pydantic_ai import Agent as Framework
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        ))  # fmt: skip
        agent = Framework(OpenAIChatModel("agrpo", provider=provider))

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        result = await agent.run(data["messages"][0]["content"])
        return float(result.output == data["answer"])


def test_a_framework_plays_a_tool_loop_as_one_token_exact_sample(tokenizer):
    pytest.importorskip("pydantic_ai")
    call = '<tool_call>{"name": "add",   "arguments": {"a": 2, "b": 3}}</tool_call>'
    rollout = play(tokenizer, PydanticAgent(), call, "5")
    assert rollout.rewards == {"agent": 1.0} and rollout.tool_call_count == 1
    (chain,) = chains(rollout.turns)
    text = tokenizer.decode(np.concatenate([chain[-1].prompt_ids, chain[-1].output_ids]))
    assert text.endswith(
        f"assistant\n{call}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"]

"""Tools: what they must state, how calls are answered, counted and limited (TOOL-1 to TOOL-14)."""

import asyncio
import time

import env_samples
import pytest
from env_chat import TOOL_TEMPLATE, Scripted, call, make_tokenizer

from agrpo.env.conversation import Conversation
from agrpo.env.tools import BadArguments, as_text, function_at
from agrpo.errors import ConfigError
from agrpo.sampler.vllm import Vllm
from agrpo.types import Prompt

ASK = Prompt(0, 0, [{"role": "user", "content": "How much?"}], {})


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def play(tokenizer, texts, prompt=ASK, max_model_len=4099, **settings):
    settings["tools"] = [f"env_samples.{name}" for name in settings.get("tools", ["multiply"])]
    model = Scripted(tokenizer, texts)

    async def run():
        player = Conversation(**settings).open(tokenizer, Vllm(), max_model_len)
        try:
            return await player.play(prompt, model, 5, 2)
        finally:
            await player.close()

    return asyncio.run(run()), model


def totals(rollout):
    found = {}
    for name, value, weight in rollout.measured:
        old = found.get(name, (0.0, 0.0))
        found[name] = (old[0] + value, old[1] + weight)
    return found


def results(rollout):
    return [m["content"] for m in rollout.completion if m["role"] == "tool"]


def test_the_documents_tools_are_offered_called_and_answered_in_order(tokenizer):
    env_samples.seen_threads.clear()
    texts = [call("multiply", a=6, b="7") + "\n" + call("async_add", a=1, b=2), "Both done."]
    rollout, model = play(tokenizer, texts, tools=["multiply", "async_add"])
    first = model.asked[0][0]
    assert '"name": "multiply"' in first and "The second integer." in first and "async_add" in first
    assert results(rollout) == ["42", "3"]
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "tool", "assistant"]
    assert rollout.completion[1]["name"] == "multiply" and rollout.completion[-1]["content"] == "Both done."
    assert [key for _, key in model.asked] == [(5, 2, 0), (5, 2, 1)]
    assert (rollout.tool_call_count, rollout.tool_failure_count, rollout.truncated) == (2, 0, False)
    # The coroutine ran on the event loop, the function in a thread.
    assert {name == "MainThread" for name in env_samples.seen_threads} == {True, False}
    assert totals(rollout)["tools/parallel_calls_mean"] == (2, 1)
    assert totals(rollout)["tools/call_frequency"] == (2, 1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("divide", a=1), "error: there is no tool divide; the tools are: multiply, fail, picture"),
        (call("fail", text="lost"), "error: LookupError: lost"),
        (call("multiply", a="six", b=7), "error: argument a of multiply: Expected `int`, got `str`"),
        (call("multiply", a=6), "error: multiply needs the argument b"),
        (call("multiply", a=6, b=7, c=8), "error: multiply has no argument c; it takes a, b"),
        (call("multiply", a=True, b=7), "error: argument a of multiply: Expected `int`, got `bool`"),
        (call("picture", kind="image"), "error: TypeError: the result is an image"),
    ],
)
def test_a_call_that_fails_is_answered_and_counted_and_the_talk_goes_on(tokenizer, text, answer):
    rollout, _ = play(tokenizer, [text, "I see."], tools=["multiply", "fail", "picture"])
    assert results(rollout)[0].startswith(answer)
    assert (rollout.tool_call_count, rollout.tool_failure_count) == (1, 1)
    assert totals(rollout)["tools/failure_frequency"] == (1, 1)
    assert ("tools/unknown_name_count" in totals(rollout)) == ("divide" in text)


def test_a_container_is_answered_as_json_and_a_call_that_cannot_be_read_ends_the_talk(tokenizer):
    rollout, _ = play(tokenizer, [call("picture", kind="é"), '<tool_call>{"name": }</tool_call>'], tools=["picture"])
    assert results(rollout) == ['{"kind": "é", "parts": [1, null]}']
    assert rollout.completion[-1] == {"role": "assistant", "content": '<tool_call>{"name": }</tool_call>'}
    assert as_text(1.5) == "1.5" and as_text({1}) == "{1}"


def test_a_call_over_the_time_limit_fails_and_nobody_waits_for_it(tokenizer):
    began = time.monotonic()
    rollout, _ = play(tokenizer, [call("wait", seconds=30), "Too slow."], tools=["wait"], tool_timeout=0.1)
    assert results(rollout) == ["error: wait gave no result in 0.1 s"]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("limit", "turns", "rounds"), [(0, 1, 0), (1, 2, 1), (None, 3, 2)])
def test_rounds_are_limited_and_calls_after_the_last_are_not_run(tokenizer, limit, turns, rounds):
    again = call("multiply", a=2, b=3)
    rollout, _ = play(tokenizer, [again, again, "Six."], max_tool_calling_iterations=limit)
    assert (len(rollout.turns), rollout.tool_call_count) == (turns, rounds)
    assert totals(rollout)["tools/loop_exhausted_frac"] == (float(limit is not None), 1)
    assert rollout.failure is None and rollout.truncated is False


def test_a_later_turn_without_room_ends_the_rollout_as_clipped(tokenizer):
    again = call("multiply", a=2, b=3)
    whole, model = play(tokenizer, [again, again, "Six."])
    room = len(whole.turns[1].prompt_ids) + 1
    rollout, _ = play(tokenizer, [again, again, "Six."], max_model_len=room)
    assert (len(rollout.turns), rollout.truncated, whole.truncated) == (2, True, False)


def test_slow_tools_of_one_rollout_do_not_hold_another(tokenizer):
    async def run():
        player = Conversation(tools=["env_samples.wait", "env_samples.multiply"]).open(tokenizer, Vllm(), 4099)
        slow = asyncio.create_task(player.play(ASK, Scripted(tokenizer, [call("wait", seconds=1.0), "x"]), 0, 0))
        await asyncio.sleep(0.05)
        fast = [player.play(ASK, Scripted(tokenizer, [call("multiply", a=2, b=3), "x"]), 1, i) for i in range(17)]
        done = await asyncio.gather(*fast)
        assert not slow.done()
        await slow
        await player.close()
        return done

    assert all(results(rollout) == ["6"] for rollout in asyncio.run(run()))


def test_arguments_arrive_in_the_types_of_the_signature():
    tool = function_at("env_samples.multiply", "env.tools")
    assert tool.fit({"a": "7", "b": 2}) == {"a": 7, "b": 2}
    with pytest.raises(BadArguments, match="argument b"):
        tool.fit({"a": 1, "b": [2]})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("without_docstring", "has no docstring"),
        ("without_hint", "has no type hint on its parameter a; write a: TYPE"),
        ("without_hint", "has no type hint on its return value"),
        ("without_arguments_section", "has no description of its parameter a"),
        ("without_arguments_section", "does not describe its result; add the section Returns:"),
        ("bare_of_two", "has no type hint on its parameters a, b; write a: TYPE"),
        ("bare_of_two", "has no description of its parameters a, b; add a line 'a: ...' under Args:"),
        ("nameless", "is a lambda"),
        ("IncrementEnv", "is a class; a tool is a function"),
        ("nothing", "has no nothing"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_in_one_line(name, words):
    with pytest.raises(ConfigError) as error:
        Conversation(tools=[f"env_samples.{name}"]).open(make_tokenizer(), Vllm(), 64)
    assert all(line.startswith("env.tools: ") and "\n" not in line for line in error.value.problems)
    assert any(words in line for line in error.value.problems)


def test_two_tools_of_one_name_are_refused(tokenizer):
    double = Conversation(tools=["env_samples.multiply", "env_samples.multiply"])
    with pytest.raises(ConfigError, match="two tools are called multiply"):
        double.open(tokenizer, Vllm(), 64)


def test_a_template_that_shows_no_tools_or_forgets_is_refused(tokenizer):
    bare = make_tokenizer(TOOL_TEMPLATE[TOOL_TEMPLATE.index("{% endif %}") + len("{% endif %}") :])
    with pytest.raises(ConfigError, match="renders the same with and without tool schemas"):
        Conversation(tools=["env_samples.multiply"]).open(bare, Vllm(), 64)

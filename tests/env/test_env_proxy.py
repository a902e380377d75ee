"""The proxy on loopback, spoken to by the `openai` client library and by plain HTTP; answers are scripted token ids."""

import asyncio
import json

import aiohttp
import numpy as np
import openai
import pytest
from scripted_model import ADD, MAX_COMPLETION, MAX_MODEL_LEN, Scripted, make_tokenizer, opened, too_long

from agrpo.env.stitch import chains, stitch
from agrpo.errors import RolloutFailure
from agrpo.types import Rollout

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def client(proxy, session, **options):
    return openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key=session.key, **{"max_retries": 0, **options})


def talk(tokenizer, scenario, *script, ends=True):
    """Run `scenario(client, session, model)`; (what it returned, the session's interactions)."""

    async def run():
        model = Scripted(tokenizer, *script, ends=ends)
        async with opened(tokenizer, model) as (proxy, session), client(proxy, session) as api:
            result = await scenario(api, session, model)
            return result, await session.end()

    return asyncio.run(run())


def raw(tokenizer, scenario, *script):
    """Run `scenario(post, session, model)` where `post(body, **headers)` gives (status, parsed body, headers)."""

    async def run():
        model = Scripted(tokenizer, *script)
        async with opened(tokenizer, model) as (proxy, session), aiohttp.ClientSession() as http:

            async def post(body, path="/v1/chat/completions", **headers):
                headers = headers or {"Authorization": f"Bearer {session.key}"}
                async with http.post(proxy.url + path, json=body, headers=headers) as answer:
                    return answer.status, await answer.json(), answer.headers

            return await scenario(post, session, model)

    return asyncio.run(run())


def test_an_answer_is_recorded_as_the_tokens_that_were_sampled(tokenizer):
    async def scenario(api, session, model):
        return await api.chat.completions.create(model="any", messages=ASK, logprobs=True)

    answer, (held,) = talk(tokenizer, scenario, "It is 5")
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, answer.model) == ("It is 5", "stop", "any")
    assert answer.id == held.id and answer.usage.completion_tokens == len(held.turn.output_ids)
    assert (
        tokenizer.decode(held.turn.prompt_ids) == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "".join(e.token for e in choice.logprobs.content) == "It is 5<|im_end|>"
    np.testing.assert_allclose([e.logprob for e in choice.logprobs.content], held.turn.sampler_logprobs)


def test_each_request_has_its_own_turn_number(tokenizer):
    async def scenario(api, session, model):
        for text in ("a", "b", "c"):
            await api.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        return model.keys, model.limits

    (keys, limits), _ = talk(tokenizer, scenario, "1", "2", "3")
    assert keys == [(3, 0, 0), (3, 0, 1), (3, 0, 2)] and limits == [MAX_COMPLETION] * 3


def test_a_stream_says_the_same_as_the_whole_answer(tokenizer):
    async def scenario(api, session, model):
        options = {"model": "m", "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
        return [chunk async for chunk in await api.chat.completions.create(messages=ASK, **options)]

    chunks, (held,) = talk(tokenizer, scenario, "Let me see.\n" + CALL)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == "Let me see."
    (call,) = next(d.tool_calls for d in deltas if d.tool_calls)
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(held.turn.output_ids)
    assert {c.id for c in chunks} == {held.id}


def test_later_turns_go_on_from_the_sampled_tokens(tokenizer):
    """The call is written with blanks that no template would write: only the sampled ids hold them."""
    odd = '<tool_call>{"name":"add",  "arguments":{"a":2,"b":3}}</tool_call>'

    async def scenario(api, session, model):
        messages = list(ASK)
        for _ in range(2):
            answer = await api.chat.completions.create(model="m", messages=messages, tools=[ADD])
            call = answer.choices[0].message.tool_calls[0]
            messages.append(answer.choices[0].message)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        last = await api.chat.completions.create(model="m", messages=messages, tools=[ADD])
        return last.choices[0].message.content

    said, held = talk(tokenizer, scenario, odd, odd, "5")
    assert said == "5"
    turns = tuple(i.turn for i in held)
    assert [len(chain) for chain in chains(turns)] == [3]
    (sample,) = stitch(Rollout(turns, []), 1.0, 0, 0)
    text = tokenizer.decode(sample.token_ids)
    assert text.count(odd + "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n") == 2
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert trained == f"{odd}<|im_end|>{odd}<|im_end|>5<|im_end|>"
    assert sample.num_trained_tokens == sum(len(t.output_ids) for t in turns)


@pytest.mark.parametrize(
    "answer, is_fork",
    [
        ({"role": "assistant", "content": "It is 5"}, False),
        ({"role": "assistant", "content": [{"type": "text", "text": " It is 5\n"}], "refusal": None}, False),
        ({"role": "assistant", "content": "It is 6"}, True),
    ],
)
def test_only_what_was_answered_is_gone_on_from(tokenizer, answer, is_fork):
    async def scenario(api, session, model):
        await api.chat.completions.create(model="m", messages=ASK)
        await api.chat.completions.create(model="m", messages=[*ASK, answer, {"role": "user", "content": "Sure?"}])

    _, held = talk(tokenizer, scenario, "It is 5", "yes")
    assert len(chains([i.turn for i in held])) == 1 + is_fork
    assert (held[1].parent is None) == is_fork


def test_an_answer_without_its_end_is_ended_by_the_template_and_that_token_is_not_trained(tokenizer):
    async def scenario(api, session, model):
        first = await api.chat.completions.create(model="m", messages=ASK)
        messages = [*ASK, first.choices[0].message, {"role": "user", "content": "Go on"}]
        await api.chat.completions.create(model="m", messages=messages)
        return first.choices[0].finish_reason

    reason, held = talk(tokenizer, scenario, "It is", "5", ends=False)
    assert reason == "length"
    (sample,) = stitch(Rollout(tuple(i.turn for i in held), []), 1.0, 0, 0)
    assert "assistant\nIt is<|im_end|>\n<|im_start|>user\nGo on" in tokenizer.decode(sample.token_ids)
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "It is5"


def test_an_answer_ends_at_the_token_that_completes_a_stop_string(tokenizer):
    async def scenario(api, session, model):
        return await api.chat.completions.create(model="m", messages=ASK, stop=["never", "much 7"])

    answer, (held,) = talk(tokenizer, scenario, "How much 7 is")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("How ", "stop")
    assert tokenizer.decode(held.turn.output_ids) == "How much 7"
    assert (
        len(held.turn.sampler_logprobs)
        == len(held.turn.versions)
        == len(held.turn.head_ids)
        == len(held.turn.output_ids)
    )


def test_max_tokens_shorten_an_answer_and_never_lengthen_it(tokenizer):
    async def scenario(api, session, model):
        await api.chat.completions.create(model="m", messages=ASK, max_tokens=5)
        await api.chat.completions.create(model="m", messages=ASK, max_completion_tokens=7, max_tokens=11)
        await api.chat.completions.create(model="m", messages=ASK, max_tokens=10_000)
        return model.limits

    limits, _ = talk(tokenizer, scenario, "1", "2", "3")
    assert limits == [5, 7, MAX_COMPLETION]


def test_tool_choice_none_shows_the_tools_and_reads_no_call(tokenizer):
    async def scenario(api, session, model):
        return await api.chat.completions.create(model="m", messages=ASK, tools=[ADD], tool_choice="none")

    answer, (held,) = talk(tokenizer, scenario, CALL)
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content == CALL
    assert '"name": "add"' in tokenizer.decode(held.turn.prompt_ids)


@pytest.mark.parametrize(
    "more, param",
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"n": 2}, "n"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"functions": [{}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tokenizer, more, param):
    async def scenario(post, session, model):
        return await post({"model": "m", "messages": ASK, **more})

    status, body, headers = raw(tokenizer, scenario)
    assert status == 400 and body["error"]["param"] == param and param.split(".")[-1] in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error" and headers["x-should-retry"] == "false"


def test_what_equals_the_runs_sampling_or_changes_nothing_is_accepted(tokenizer):
    async def scenario(post, session, model):
        own = {"temperature": 1, "top_p": 1.0, "top_k": -1, "presence_penalty": 0, "n": 1, "seed": 7, "user": "me"}
        return await post(
            {"model": "m", "messages": ASK, **own, "tool_choice": None, "response_format": {"type": "text"}}
        )

    status, body, _ = raw(tokenizer, scenario, "5")
    assert status == 200 and body["choices"][0]["message"]["content"] == "5"


def test_a_key_opens_its_own_session_only(tokenizer):
    async def run():
        one, two = Scripted(tokenizer, "one"), Scripted(tokenizer, "two")
        async with opened(tokenizer, one, two) as (proxy, first, second), aiohttp.ClientSession() as http:

            async def post(**headers):
                url = proxy.url + "/v1/chat/completions"
                async with http.post(url, json={"messages": ASK}, headers=headers) as answer:
                    return answer.status, await answer.json()

            assert (await post(Authorization=f"Bearer {first.key}"))[0] == 200
            assert (await post(**{"x-api-key": second.key}))[0] == 200
            for headers in ({}, {"Authorization": "Bearer sk-other"}):
                status, body = await post(**headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            proxy.shut(first)
            assert (await post(Authorization=f"Bearer {first.key}"))[0] == 401
            (a,), (b,) = await first.end(), await second.end()
            assert (a.message["content"], b.message["content"]) == ("one", "two")

    asyncio.run(run())


def test_a_client_that_gives_up_waiting_and_asks_again_gets_the_first_answer(tokenizer):
    """The library's own retry after its time-out: one generation, one interaction."""

    async def run():
        model = Scripted(tokenizer, 0.4, "slow")
        async with opened(tokenizer, model) as (proxy, session):
            async with client(proxy, session, timeout=0.15, max_retries=5) as api:
                answer = await api.chat.completions.create(model="m", messages=ASK)
            return answer, len(model.prompts), await session.end()

    answer, num_generated, held = asyncio.run(run())
    assert answer.choices[0].message.content == "slow" and num_generated == 1
    assert [i.id for i in held] == [answer.id]


def test_a_retry_that_says_so_gets_the_answer_that_was_given_before(tokenizer):
    async def scenario(post, session, model):
        body, key = {"messages": ASK}, {"Authorization": f"Bearer {session.key}"}
        first = await post(body)
        second = await post(body, **key, **{"x-stainless-retry-count": "1"})
        third = await post(body)  # no retry: the agent wants another answer to the same question
        return [a[1]["id"] for a in (first, second, third)], [i.id for i in await session.end()]

    asked, recorded = raw(tokenizer, scenario, "5", "6")
    assert asked[0] == asked[1] != asked[2] and recorded == [asked[0], asked[2]]


def test_two_equal_requests_at_the_same_time_are_two_answers(tokenizer):
    async def scenario(api, session, model):
        asks = (api.chat.completions.create(model="m", messages=ASK) for _ in range(2))
        return {a.choices[0].message.content for a in await asyncio.gather(*asks)}

    said, held = talk(tokenizer, scenario, 0.1, "5", "6")
    assert said == {"5", "6"} and len(held) == 2


def test_an_answer_that_never_reached_the_agent_is_not_recorded(tokenizer):
    async def scenario(api, session, model):
        with pytest.raises(openai.APITimeoutError):
            await api.with_options(timeout=0.1).chat.completions.create(model="m", messages=ASK)
        await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "other"}])
        await asyncio.sleep(0.3)

    _, held = talk(tokenizer, scenario, 0.25, "late", "5")
    assert [i.message["content"] for i in held] == ["5"]


def test_failed_generations_are_errors_that_no_client_repeats(tokenizer):
    async def run():
        model = Scripted(tokenizer, too_long(), RolloutFailure("unavailable", "no server"))
        async with opened(tokenizer, model) as (proxy, session), client(proxy, session, max_retries=3) as api:
            with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)) as error:
                await api.chat.completions.create(model="m", messages=ASK)
            assert error.value.code == "context_length_exceeded"
            with pytest.raises(openai.InternalServerError, match="no server"):
                await api.chat.completions.create(model="m", messages=ASK)
            return session.error.reason, len(model.prompts), await session.end()

    assert asyncio.run(run()) == ("prompt_too_long", 2, [])


def test_messages_that_the_template_refuses_are_the_requests_fault(tokenizer):
    refusing = make_tokenizer()
    refusing.chat_template = "{{ raise_exception('only users') }}"

    async def scenario(post, session, model):
        return await post({"messages": ASK})

    status, body, _ = raw(refusing, scenario)
    assert status == 400 and "only users" in body["error"]["message"]


def test_rewards_are_set_by_the_id_of_an_answer(tokenizer):
    async def scenario(post, session, model):
        first = (await post({"messages": ASK}))[1]["id"]
        await post({"messages": [{"role": "user", "content": "b"}]})
        path = "/v1/rl/set_reward"
        assert (await post({"interaction_id": first, "reward": 0.5}, path))[0] == 200
        assert (await post({"interaction_id": None, "reward": 2}, "/rl/set_reward"))[0] == 200
        assert (await post({"interaction_id": "other", "reward": 1}, path))[1]["error"]["param"] == "interaction_id"
        assert (await post({"interaction_id": first, "reward": True}, path))[1]["error"]["param"] == "reward"
        return [i.reward for i in await session.end()]

    assert raw(tokenizer, scenario, "5", "6") == [0.5, 2.0]


def test_the_models_are_listed(tokenizer):
    async def scenario(api, session, model):
        return [m.id async for m in api.models.list()]

    assert talk(tokenizer, scenario)[0] == ["agrpo"]

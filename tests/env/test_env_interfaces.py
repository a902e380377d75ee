"""The proxy's other two interfaces: responses through the `openai` client, messages as plain HTTP."""

import asyncio
import json

import aiohttp
import numpy as np
import openai
import pytest
from scripted_model import ADD, Scripted, make_tokenizer, opened

from agrpo.env.stitch import chains

CALL = '<tool_call>{"name":"add",  "arguments":{"a":2,"b":3}}</tool_call>'
ADD_ITEM = {"type": "function", **ADD["function"]}
ADD_BLOCK = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
ASK = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def respond(tokenizer, scenario, *script):
    async def run():
        async with opened(tokenizer, Scripted(tokenizer, *script)) as (proxy, session):
            async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key=session.key, max_retries=0) as api:
                result = await scenario(api.responses)
            return result, await session.end()

    return asyncio.run(run())


def messages(tokenizer, bodies, *script):
    """The answers to each body in turn, parsed, or as text for a stream; a body may be a function of the answers so far."""

    async def run():
        async with opened(tokenizer, Scripted(tokenizer, *script)) as (proxy, session), aiohttp.ClientSession() as http:
            answers = []
            for body in bodies:
                body = body(answers) if callable(body) else body
                headers = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
                async with http.post(proxy.url + "/v1/messages", json={"model": "m", **body}, headers=headers) as answer:
                    answers.append(await (answer.text() if body.get("stream") else answer.json()))
            return answers, await session.end()

    return asyncio.run(run())


def only_sample_of(held):
    (chain,) = chains([i.turn for i in held])
    return np.concatenate([chain[-1].prompt_ids, chain[-1].output_ids])


def test_responses_play_a_tool_loop_as_one_sample(tokenizer):
    async def scenario(api):
        items = list(ASK)
        first = await api.create(model="m", input=items, tools=[ADD_ITEM], instructions="Be brief.")
        items += [item.model_dump() for item in first.output]
        items.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "5"})
        return first, await api.create(model="m", input=items, tools=[ADD_ITEM], instructions="Be brief.")

    (first, last), held = respond(tokenizer, scenario, "Let me see.\n" + CALL, "5")
    assert [item.type for item in first.output] == ["message", "function_call"]
    assert json.loads(first.output[1].arguments) == {"a": 2, "b": 3} and first.output_text == "Let me see."
    assert last.output_text == "5" and last.status == "completed" and last.id == held[1].id
    text = tokenizer.decode(only_sample_of(held))
    assert "Be brief." in text and f"Let me see.\n{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in text


def test_responses_go_on_from_an_earlier_one_by_its_id(tokenizer):
    async def scenario(api):
        first = await api.create(model="m", input="What is 2 + 3?")
        await api.create(model="m", input="Sure?", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="resp_none"):
            await api.create(model="m", input="Sure?", previous_response_id="resp_none")

    _, held = respond(tokenizer, scenario, "5", "yes")
    assert tokenizer.decode(only_sample_of(held)).count("<|im_start|>") == 4


def test_a_stream_of_responses_ends_in_the_whole_answer(tokenizer):
    async def scenario(api):
        return [e async for e in await api.create(model="m", input="2 + 3?", tools=[ADD_ITEM], stream=True)]

    events, held = respond(tokenizer, scenario, "Let me see.\n" + CALL)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Let me see."
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"a": 2, "b": 3}
    assert events[-1].type == "response.completed" and events[-1].response.id == held[0].id
    assert [i.type for i in events[-1].response.output] == ["message", "function_call"]


@pytest.mark.parametrize(
    "more, text",
    [
        ({"temperature": 0.3}, "temperature"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\]"),
    ],
)
def test_responses_refuse_what_they_cannot_do(tokenizer, more, text):
    async def scenario(api):
        with pytest.raises(openai.BadRequestError, match=text):
            await api.create(**{"model": "m", "input": "2 + 3?", **more})

    respond(tokenizer, scenario)


def test_messages_play_a_tool_loop_as_one_sample(tokenizer):
    def second(answers):
        use = answers[0]["content"][-1]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "5"}]}
        talk = [*ASK, {"role": "assistant", "content": answers[0]["content"]}, {"role": "user", "content": [result]}]
        return {"messages": talk, "tools": [ADD_BLOCK], "max_tokens": 50, "system": "Be brief."}

    first = {"messages": ASK, "tools": [ADD_BLOCK], "max_tokens": 50, "system": [{"type": "text", "text": "Be brief."}]}
    (call, last), held = messages(tokenizer, [first, second], "Let me see.\n" + CALL, "5")
    assert [b["type"] for b in call["content"]] == ["text", "tool_use"] and call["stop_reason"] == "tool_use"
    assert call["content"][1]["input"] == {"a": 2, "b": 3}
    assert last["content"] == [{"type": "text", "text": "5"}] and last["stop_reason"] == "end_turn"
    text = tokenizer.decode(only_sample_of(held))
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n5" in text and "Be brief." in text


def test_messages_are_streamed_block_by_block(tokenizer):
    body = {"messages": ASK, "tools": [ADD_BLOCK], "max_tokens": 50, "stream": True}
    (text,), held = messages(tokenizer, [body], "Let me see.\n" + CALL)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [e["type"] for e in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["id"] == held[0].id and events[2]["delta"]["text"] == "Let me see."
    assert json.loads(events[5]["delta"]["partial_json"]) == {"a": 2, "b": 3}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_messages_name_the_stop_sequence_and_what_they_refuse(tokenizer):
    stopped = {"messages": ASK, "max_tokens": 50, "stop_sequences": ["7"]}
    forced = {"messages": ASK, "max_tokens": 50, "tool_choice": {"type": "any"}}
    (answer, refused), _ = messages(tokenizer, [stopped, forced], "How much 7 is")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "7")
    assert refused["type"] == "error" and "tool_choice" in refused["error"]["message"]

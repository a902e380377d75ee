"""Tool calls as each model family writes them, from the families' published formats; what is no call stays text."""

import json

import pytest

from agrpo.env.calls import find, parse

TWO = [("add", {"a": 1, "b": [2, "x"]}, ""), ("f.g-h", {}, "")]
BAR, LOW = "\uff5c", "\u2581"


def deepseek(word):
    return f"<{BAR}tool{LOW}{word.replace(' ', LOW)}{BAR}>"


def fenced(name, arguments):
    start = f"{deepseek('call begin')}function{deepseek('sep')}{name}"
    return f"{start}\n```json\n{json.dumps(arguments)}\n```{deepseek('call end')}"


def objects(key):
    return [json.dumps({"name": name, key: arguments}) for name, arguments, _ in TWO]


class Plain:
    """A tokenizer of which only the template counts."""

    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, chat_template=None):
        self.chat_template = chat_template


WRITTEN = {
    "qwen": "".join(f"<tool_call>\n{o}\n</tool_call>\n" for o in objects("arguments")),
    "smollm2": f"<tool_call>[{', '.join(objects('arguments'))}]</tool_call>",
    "mistral": f"[TOOL_CALLS] [{', '.join(objects('arguments'))}]",
    "mistral named": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}[TOOL_CALLS]f.g-h[CALL_ID]a1[ARGS]{}',
    "llama tagged": f"<|python_tag|>{'; '.join(objects('parameters'))}",
    "llama function": '<function=add>{"a": 1, "b": [2, "x"]}</function><function=f.g-h>{}</function>',
    "deepseek v3": f"{deepseek('calls begin')}{fenced(*TWO[0][:2])}\n{fenced(*TWO[1][:2])}{deepseek('calls end')}",
    "deepseek v3.1": deepseek("calls begin")
    + "".join(f"{deepseek('call begin')}{n}{deepseek('sep')}{json.dumps(a)}{deepseek('call end')}" for n, a, _ in TWO)
    + deepseek("calls end"),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_each_familys_calls_are_read_in_order(family):
    assert find(f"Let me see. {WRITTEN[family]}") == ("Let me see. ", TWO)


def test_llamas_bare_object_is_a_call_for_its_own_template_only():
    text = '{"name": "add", "parameters": {"a": "1"}}'
    assert find(text, "<|start_header_id|>")[1] == [("add", {"a": "1"}, "")]
    assert find(text, "<tool_call>") == (text, [])
    assert find('{"name": "an answer in JSON"}', "<|start_header_id|>")[1] == []


def test_qwen_coders_parameters_keep_their_text():
    text = "<tool_call>\n<function=run>\n<parameter=code>\nx = 1\n\nprint(x)\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    assert find(text)[1] == [("run", {"code": "x = 1\n\nprint(x)", "n": "7"}, "")]


def test_a_format_that_the_template_does_not_show_is_text():
    assert find(WRITTEN["mistral"], "... <tool_call> ...")[1] == []


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call> and more',
        "<tool_call>\n<function=run>\nx\n</function>\n</tool_call>",
        '[TOOL_CALLS]{"name": 7}',
        "<|python_tag|>print(1)",
        f"{deepseek('call begin')}add{deepseek('sep')}{{",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_cannot_be_read_whole_stays_an_ordinary_message(text):
    assert parse(text, Plain()) == (text, [])


def test_arguments_may_be_a_string_that_holds_an_object():
    assert find('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>')[1] == [("add", {"a": 1}, "")]


def test_an_identifier_that_the_model_gives_is_kept():
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}]'
    call = {"type": "function", "function": {"name": "add", "arguments": {}}, "id": "a1b2c3d4e"}
    assert parse(text, Plain("[TOOL_CALLS]")) == ("", [call])

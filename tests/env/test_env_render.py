"""Rendering: what is new costs alone, and its ids are those of the whole conversation; templates that forget are found out."""

import numpy as np
import pytest
from env_chat import FORGETFUL_TEMPLATE, TOOL_TEMPLATE, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.env.conversation import fitting_template
from agrpo.env.render import USER, Growing, Renderer, probe_round
from agrpo.env.templates import PATCHES, training_template
from agrpo.errors import ConfigError

SCHEMAS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"properties": {}}}}]
BAR, LOW = "\uff5c", "\u2581"
# As Qwen3 does it: the reasoning block of the last message only, here in a template of this file's own.
QWEN3_LIKE = TOOL_TEMPLATE.replace(
    "(message.content or '') }}",
    "'' }}{%- if message.role == 'assistant' %}" + PATCHES[0].fragment.replace("reasoning_content", "false")
    + "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}{{- message.content or '' }}",
).replace("false) %}", "reasoning_content) %}")  # fmt: skip
# As Mistral does it: the system text stands in the last user message, as long as nothing follows.
SYSTEM_LAST = TOOL_TEMPLATE.replace(
    "{%- else %}\n{{- '<|im_start|>' + message.role",
    "{%- elif message.role == 'system' %}{%- elif loop.last and messages[0].role == 'system' %}"
    "{{- '<|im_start|>user\\n' + messages[0].content + message.content + '<|im_end|>\\n' }}"
    "{%- else %}\n{{- '<|im_start|>' + message.role",
)
MAPPINGS_REFUSED = TOOL_TEMPLATE.replace("(call.function.arguments | tojson)", "call.function.arguments")
DEEPSEEK_MARKS = [f"<{BAR}{name}{BAR}>" for name in ("User", "Assistant", f"end{LOW}of{LOW}sentence")]
DEEPSEEK_MARKS += [
    f"<{BAR}tool{LOW}{name}{BAR}>"
    for name in (f"calls{LOW}begin", f"calls{LOW}end", f"call{LOW}begin", f"call{LOW}end", "sep", f"outputs{LOW}begin",
                 f"outputs{LOW}end", f"output{LOW}begin", f"output{LOW}end")
]  # fmt: skip
DEEPSEEK_LIKE = "{% for m in messages %}{{ m.content }}{% endfor %}" + DEEPSEEK_MARKS[3]


@pytest.fixture(scope="module")
def renderer():
    return Renderer(make_tokenizer(), {}, SCHEMAS)


words = st.text("ab 7\n\t.é<|>_end", max_size=12)
arguments = st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(st.integers(-9, 99), words), max_size=2)


@st.composite
def rounds(draw):
    calls = [
        {"type": "function", "function": {"name": draw(st.sampled_from(["look", "f"])), "arguments": draw(arguments)}}
        for _ in range(draw(st.integers(1, 3)))
    ]
    assistant = {"role": "assistant", "content": draw(words), "tool_calls": calls}
    return [assistant, *({"role": "tool", "name": "look", "content": draw(words)} for _ in calls)]


starts = st.lists(words, min_size=1, max_size=2).map(
    lambda texts: [{"role": r, "content": t} for r, t in zip(("system", "user")[-len(texts) :], texts, strict=True)]
)


@settings(max_examples=60, deadline=None)
@given(start=starts, blocks=st.lists(rounds(), min_size=1, max_size=5))
def test_what_is_new_alone_gives_the_ids_of_the_whole(renderer, start, blocks):
    renderer.compared.clear()
    renderer.compared[tuple(m["role"] for m in start)] = 99  # no comparison at work: the equality below is its own
    growing = Growing(renderer, start, renderer.ids(start))
    for block in blocks:
        prompt = growing.extend(block)
        assert growing.is_incremental and np.array_equal(prompt, renderer.ids(growing.messages))


def test_a_template_that_renders_by_position_is_rendered_whole():
    short = TOOL_TEMPLATE.replace("(message.content or '')", "((message.content or '') if loop.revindex < 4 else '-')")
    renderer = Renderer(make_tokenizer(short), {}, SCHEMAS)
    assert not renderer.grows()
    growing = Growing(renderer, [USER], renderer.ids([USER]))
    for n in range(3):
        assert np.array_equal(growing.extend(probe_round(n)), renderer.ids(growing.messages))
        assert not growing.is_incremental


def test_a_template_that_rewrites_what_was_said_forks_but_its_prompts_still_grow():
    forgetful = Renderer(make_tokenizer(FORGETFUL_TEMPLATE), {}, SCHEMAS)
    assert forgetful.grows() and not forgetful.keeps_history()


def test_a_start_that_is_rendered_anew_is_noticed_at_work():
    renderer = Renderer(make_tokenizer(SYSTEM_LAST), {}, SCHEMAS)
    start = [{"role": "system", "content": "Be brief."}, USER]
    assert renderer.grows()
    growing = Growing(renderer, start, renderer.ids(start))
    assert np.array_equal(growing.extend(probe_round(0)), renderer.ids(growing.messages))
    assert not growing.is_incremental and renderer.compared[("system", "user")] == -1


def test_later_user_messages_are_proven_by_themselves():
    chat = [USER, {"role": "assistant", "content": "<think>\na\n</think>\n\nb"}]
    forgets_thoughts = TOOL_TEMPLATE.replace(
        "(message.content or '')", "((message.content or '') if loop.index0 > messages|length - 3 else 'c')"
    )
    assert Renderer(make_tokenizer(), {}).grows(with_users=True)
    renderer = Renderer(make_tokenizer(forgets_thoughts), {})
    assert not renderer.grows(with_users=True)
    growing = Growing(renderer, [USER], renderer.ids([USER]))
    assert np.array_equal(growing.extend([chat[1], USER]), renderer.ids([USER, chat[1], USER]))


def test_arguments_go_as_text_to_a_template_that_rejects_mappings():
    renderer = Renderer(make_tokenizer(MAPPINGS_REFUSED), {}, SCHEMAS)
    assert renderer.keeps_history() and renderer.grows()
    assert '{"n": 0, "s": "a b"}' in make_tokenizer().decode(renderer.ids([USER, *probe_round(0)]))


def test_qwen3s_reasoning_block_is_kept_by_its_training_template():
    tokenizer = make_tokenizer(QWEN3_LIKE)
    assert not Renderer(tokenizer, {}, SCHEMAS).keeps_history()
    template = fitting_template(tokenizer, {}, SCHEMAS, True)
    assert Renderer(tokenizer, {}, SCHEMAS, template).grows()
    assert tokenizer.chat_template == QWEN3_LIKE  # what is saved is the model's own


def test_deepseeks_training_template_shows_tools_and_keeps_every_round():
    tokenizer = make_tokenizer(DEEPSEEK_LIKE, DEEPSEEK_MARKS)
    template = fitting_template(tokenizer, {}, SCHEMAS, True)
    assert training_template(DEEPSEEK_LIKE) == ("deepseek_v3", template)
    renderer = Renderer(tokenizer, {}, SCHEMAS, template)
    assert renderer.grows() and renderer.keeps_history(3)


def test_an_unknown_template_that_forgets_is_refused_unless_forks_are_accepted():
    tokenizer = make_tokenizer(FORGETFUL_TEMPLATE)
    with pytest.raises(ConfigError, match="sampler.require_prefix_template=false accepts it"):
        fitting_template(tokenizer, {}, SCHEMAS, True)
    assert fitting_template(tokenizer, {}, SCHEMAS, False) is None

"""Single-turn chat through a real chat template and tokenizer, built here."""

import asyncio

import numpy as np
import pytest
import tokenizers
import transformers

from agrpo.env.conversation import Conversation
from agrpo.errors import RolloutFailure
from agrpo.sampler.vllm import Vllm
from agrpo.types import Prompt, Turn

WORDS = ["<eos>", "<end>", "<user>", "<bot>", "<think>", "two", "plus", "three", "is", "five"]
TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% if think %} <think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<user>", "<bot>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def play(player, output, messages=None):
    asked = []

    async def generate(ids, key):
        asked.append((ids, key))
        n = len(output)
        zeros = np.zeros(n, np.float32)
        empty = np.zeros((n, 0))
        return Turn(
            ids, np.array(output, np.int32), zeros, zeros == 0, zeros.astype(np.int32), empty, empty, None, "stop"
        )

    prompt = Prompt(0, 0, messages or [{"role": "user", "content": "two plus three"}], {})
    return asyncio.run(player.play(prompt, generate, 11, 3)), asked


def test_the_prompt_is_the_rendered_template_and_the_answer_is_decoded(tokenizer):
    player = Conversation().open(tokenizer, Vllm(), 64, frozenset({1}))
    rollout, ((ids, key),) = play(player, [8, 9, 1])
    assert [WORDS[i] for i in ids] == ["<user>", "two", "plus", "three", "<end>", "<bot>"]
    assert ids.dtype == np.int32 and key == (11, 3, 0)
    assert rollout.completion == [{"role": "assistant", "content": "is five"}]
    assert rollout.turns[0].output_ids.tolist() == [8, 9, 1] and rollout.failure is None


def test_template_arguments_reach_the_template(tokenizer):
    player = Conversation().open(tokenizer, Vllm(chat_template_kwargs={"think": True}), 64)
    assert [WORDS[i] for i in player.render([{"role": "user", "content": "two"}])][-2:] == ["<bot>", "<think>"]


@pytest.mark.parametrize(("output", "truncated"), [([8, 1], False), ([8, 0], False), ([8, 9], True)])
def test_an_answer_is_truncated_unless_it_ends_in_an_eos_of_the_model_or_the_tokenizer(tokenizer, output, truncated):
    player = Conversation().open(tokenizer, Vllm(), 64, frozenset({1}))
    assert play(player, output)[0].truncated == truncated


def test_a_failed_request_is_the_callers_to_handle(tokenizer):
    async def generate(ids, key):
        raise RolloutFailure("timeout", "no answer")

    player = Conversation().open(tokenizer, Vllm(), 64)
    with pytest.raises(RolloutFailure):
        asyncio.run(player.play(Prompt(0, 0, [{"role": "user", "content": "two"}], {}), generate, 0, 0))

"""A model whose answers are written down, with a real tokenizer and a template that has tools."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from agrpo.env.proxy import Proxy, Session
from agrpo.env.proxy.rendering import Rendering
from agrpo.errors import RolloutFailure
from agrpo.sampler.vllm import Vllm
from agrpo.types import Turn

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '\\nAnswer <tool_call>{"name": .., "arguments": ..}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MAX_COMPLETION, MAX_MODEL_LEN = 97, 401
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}


def make_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "recipes/quickstart/model")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Scripted:
    """`generate` gives the texts in order; an exception among them is raised, a float is seconds to wait first."""

    def __init__(self, tokenizer, *script, ends=True):
        self.tokenizer, self.script, self.ends = tokenizer, list(script), ends
        self.prompts, self.keys, self.limits = [], [], []

    async def __call__(self, prompt_ids, key, max_tokens=None):
        self.prompts.append(prompt_ids)
        self.keys.append(key)
        self.limits.append(max_tokens)
        entry = self.script.pop(0)
        if isinstance(entry, float):
            text = self.script.pop(0)
            await asyncio.sleep(entry)
            entry = text
        if isinstance(entry, Exception):
            raise entry
        return self.turn(prompt_ids, entry, len(self.prompts))

    def turn(self, prompt_ids, text, version):
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = np.array([*ids, self.tokenizer.eos_token_id] if self.ends else ids, np.int32)
        n = len(ids)
        return Turn(
            prompt_ids=prompt_ids,
            output_ids=ids,
            sampler_logprobs=-np.arange(1, n + 1, dtype=np.float32) / 7,
            output_mask=np.ones(n, np.bool_),
            versions=np.full(n, version, np.int32),
            head_ids=np.zeros((n, 2), np.int32),
            head_logprobs=np.zeros((n, 2), np.float32),
            candidates=None,
            finish_reason="stop" if self.ends else "length",
        )


def too_long():
    return RolloutFailure("prompt_too_long", f"409 tokens, but the server's context is {MAX_MODEL_LEN}")


@contextlib.asynccontextmanager
async def opened(tokenizer, *models, temperature=1.0):
    """(proxy, one open session per model)"""
    sampler = Vllm(max_completion_length=MAX_COMPLETION, temperature=temperature)
    proxy = Proxy(tokenizer, sampler, MAX_MODEL_LEN)
    rendering = Rendering(tokenizer, {}, frozenset({tokenizer.eos_token_id}))
    sessions = [Session(model, 3, slot, rendering, tokenizer) for slot, model in enumerate(models)]
    await proxy.start()
    try:
        for session in sessions:
            proxy.open(session)
        yield proxy, *sessions
    finally:
        await proxy.close()

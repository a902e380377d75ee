"""A byte-level tokenizer with the chat templates of several families' kinds, and scripted models that answer through it."""

from pathlib import Path

import numpy as np
import transformers

from agrpo.types import Turn

TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Renders only the last assistant message with its text: every later turn is a fork.
FORGETFUL_TEMPLATE = TOOL_TEMPLATE.replace(
    "(message.content or '')", "((message.content or '') if loop.last or message.role != 'assistant' else '-')"
)
MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"


def make_tokenizer(template=TOOL_TEMPLATE, extra=()):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    tokenizer.chat_template = template
    return tokenizer


def make_turn(prompt_ids, output_ids, logprobs=None):
    n = len(output_ids)
    return Turn(
        prompt_ids=np.asarray(prompt_ids, np.int32),
        output_ids=np.asarray(output_ids, np.int32),
        sampler_logprobs=np.full(n, -0.5, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        output_mask=np.ones(n, bool),
        versions=np.ones(n, np.int32),
        head_ids=np.zeros((n, 0), np.int32),
        head_logprobs=np.zeros((n, 0), np.float32),
        candidates=None,
        finish_reason="stop",
    )


class Scripted:
    """Says the given texts in turn; keeps what it was asked. `<|im_end|>` is added unless the text has it."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), []

    async def __call__(self, prompt_ids, key):
        text = self.texts[len(self.asked)]
        self.asked.append((self.tokenizer.decode(prompt_ids), key))
        return make_turn(prompt_ids, self.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"])


def call(name, **arguments):
    import json

    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'

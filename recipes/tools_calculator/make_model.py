"""Make the model, tokenizer and question files: `python -m agrpo.recipes.tools_calculator.make_model [FOLDER]`.

The model reads the conversations of `corpus.py` until it writes calls in the right form. It is also the starting model of
the recipes env_counter and env_two. One thread on purpose; takes a few minutes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agrpo.recipes.quickstart.make_model import PATTERN
from agrpo.recipes.tools_calculator.corpus import COLOURS, PHRASINGS, Conversation, conversations, files

SEED, NUM_STEPS, BATCH_SIZE, PEAK_LEARNING_RATE = 11, 700, 32, 4e-3
# The frame of a call is a handful of tokens, so that what a call says is most of what there is to learn.
MARKS = ('<tool_call>\n{"name": "', '", "arguments": {"', '": "', '": ', '"}}\n</tool_call>', "}}\n</tool_call>")
# The schemas are shown as signatures, `calculate(expression)`: a small model reads few tokens well.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}{{ '\\n' + tool.function.name + '(' + "
    "tool.function.parameters.properties | list | join(', ') + ')' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first else '' }}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text goes through; the words of the conversations are one token each, digits always single."""
    tokenizer = Tokenizer(models.BPE())
    split_words = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    split_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_words, split_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    texts = [text.format(a=1, b=2) for text in PHRASINGS]
    texts += ["Increment the counter by 3.", "Done.", "tools", "user", "assistant", "tool"]
    texts += [f"Light the {colour} lamp. {colour}" for colour in COLOURS]
    texts += ["calculate(expression) press(colour) increment(step) calculate expression press colour increment step"]
    tokenizer.train_from_iterator(texts * 2, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, batch: list[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids [B, L], labels [B, L]), right padded; only what an assistant writes has labels, its end included."""
    rows = [_labelled(tokenizer, schemas, messages) for schemas, messages in batch]
    length = max(len(ids) for ids, _ in rows)
    token_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for i, (ids, is_said) in enumerate(rows):
        token_ids[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(ids)] = torch.where(torch.tensor(is_said), torch.tensor(ids), -100)
    return token_ids, labels


def _labelled(
    tokenizer: PreTrainedTokenizerFast, schemas: list[dict], messages: list[dict]
) -> tuple[list[int], list[bool]]:
    """Token ids and which of them the model writes: after `assistant\\n`, up to the end token."""
    text = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    head = tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
    said, is_said, i = False, [], 0
    while i < len(ids):
        if ids[i] == start:
            opening = 1 + len(head) if ids[i + 1 : i + 1 + len(head)] == head else 1
            said = opening > 1
            is_said += [False] * opening
            i += opening
            continue
        is_said.append(said)
        said = said and ids[i] != end
        i += 1
    return ids, is_said


def train(model, tokenizer, num_steps: int, peak: float, seed: int) -> None:
    """Supervised steps with warm-up and linear decay to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, num_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (num_steps - step) / (num_steps - warmup))
    )
    source = conversations(seed)
    started = time.monotonic()
    for step in range(num_steps):
        token_ids, labels = encode(tokenizer, [next(source) for _ in range(BATCH_SIZE)])
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


def main(folder: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums in one order, so that the same machine type makes the same weights
    for name, content in files().items():
        (folder / name).write_text(content)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, NUM_STEPS, PEAK_LEARNING_RATE, SEED)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

"""Make the quickstart's model, tokenizer and question files: `python -m agrpo.recipes.quickstart.make_model [FOLDER]`.

The model first reads a textbook without mistakes, which teaches it to calculate, then a badly printed one, in which 15% of the
digits and so 30% of the answers are wrong, which teaches it to slip. It sees no held-out question. One thread on purpose;
takes about 11 minutes. Made twice on one machine, the weights are the same to the last bit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agrpo.recipes.quickstart.questions import PHRASINGS, files, rows, split, textbook

SEED = 7
CLEAN_STEPS, MISPRINTED_STEPS, BATCH_SIZE = 2400, 300, 64
PEAK_LEARNING_RATE = 2e-3
WRONG_DIGIT_FRACTION = 0.15
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen's pattern: words with their leading space, single digits, runs of signs, runs of white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text goes through; the words of the questions and the roles are one token each."""
    tokenizer = Tokenizer(models.BPE())
    split_words = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    split_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_words, split_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    texts = [text.format(a=1, b=2) for group in PHRASINGS.values() for text in group]
    tokenizer.train_from_iterator([*texts, "system", "user", "assistant", "tool"], trainer)
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
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids [B, L], labels [B, L]), right padded; only the answer and its end token have labels."""
    prompts = [[{"role": "user", "content": question}] for question, _ in examples]
    prompt_ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    answer_ids = tokenizer([f"{answer}<|im_end|>" for _, answer in examples], add_special_tokens=False)["input_ids"]
    length = max(len(p) + len(a) for p, a in zip(prompt_ids, answer_ids, strict=True))
    token_ids = torch.full((len(examples), length), tokenizer.pad_token_id)
    labels = torch.full((len(examples), length), -100)
    for i, (prompt, answer) in enumerate(zip(prompt_ids, answer_ids, strict=True)):
        end = len(prompt) + len(answer)
        token_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels


def train(model, tokenizer, num_steps: int, peak: float, wrong_digit_fraction: float, seed: int) -> None:
    """Supervised steps with warm-up and linear decay to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, num_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (num_steps - step) / (num_steps - warmup))
    )
    examples = textbook(num_steps * BATCH_SIZE, wrong_digit_fraction, seed)
    started = time.monotonic()
    for step in range(num_steps):
        token_ids, labels = encode(tokenizer, [next(examples) for _ in range(BATCH_SIZE)])
        # The head is small, so the positions without a label go through it too.
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


def accuracy(model, tokenizer, greedy: bool, num_questions: int = 500, seed: int = 0) -> float:
    """Share of held-out questions answered exactly, greedy or sampled at temperature 1."""
    lines = [json.loads(line) for line in rows(split()[1][:num_questions], 2)]
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    right = 0
    for start in range(0, len(lines), 250):
        part = lines[start : start + 250]
        prompts = [row["prompt"] for row in part]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=6, **how)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text == row["answer"] for text, row in zip(texts, part, strict=True))
    return right / len(lines)


def main(folder: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums in one order, so that the same machine type makes the same weights
    for name, content in files().items():
        (folder / name).write_text(content)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, CLEAN_STEPS, PEAK_LEARNING_RATE, 0.0, SEED)
    print(f"held out, greedy, before the misprints: {accuracy(model, tokenizer, greedy=True):.3f}", flush=True)
    train(model, tokenizer, MISPRINTED_STEPS, PEAK_LEARNING_RATE / 2, WRONG_DIGIT_FRACTION, SEED + 1)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    print(f"held out, greedy: {accuracy(model, tokenizer, greedy=True):.3f}")
    print(f"held out, sampled at temperature 1: {accuracy(model, tokenizer, greedy=False):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

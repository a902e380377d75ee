"""The quickstart's files: small, made as written, honest about what the model has seen, and about as good as promised."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from agrpo.recipes.quickstart.questions import Question, files, misprint, split, textbook
from agrpo.recipes.quickstart.rewards import correct

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
NUMBERS = re.compile(r"(\d+) (\+|-|plus|minus) (\d+)")
SIGNS = {"plus": "+", "minus": "-", "+": "+", "-": "-"}


def asked(text: str) -> Question:
    """The question read back from its words; a sum's larger number first, as the split counts them."""
    a, sign, b = NUMBERS.search(text).groups()
    a, b = (max(int(a), int(b)), min(int(a), int(b))) if SIGNS[sign] == "+" else (int(a), int(b))
    return Question(SIGNS[sign], a, b)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def loaded():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER / "model")


def test_the_recipe_is_at_most_two_megabytes():
    paths = [p for p in FOLDER.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in paths) <= 2_000_000


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_the_question_files_are_what_the_script_writes(name):
    assert (FOLDER / name).read_text() == files()[name]


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_answers_are_right_and_questions_differ(name):
    questions = [asked(row["prompt"][0]["content"]) for row in rows(name)]
    expected = [q.a + q.b if q.operation == "+" else q.a - q.b for q in questions]
    assert [row["answer"] for row in rows(name)] == [str(e) for e in expected]
    assert len(set(questions)) == len(questions)


def test_heldout_questions_are_in_no_corpus_and_not_in_training():
    heldout = {asked(row["prompt"][0]["content"]) for row in rows("heldout.jsonl")}
    training = {asked(row["prompt"][0]["content"]) for row in rows("train.jsonl")}
    assert len(heldout) == 500 and not heldout & training
    # The books draw from the known questions only; a sample of both shows it in the text the model reads.
    read = {asked(text) for wrong in (0.0, 0.15) for text, _ in textbook(20_000, wrong, seed=3)}
    assert len(read) > 7000 and not heldout & read
    assert heldout == set(split()[1])


def test_the_textbook_is_the_same_every_time_and_without_misprints_right():
    assert list(textbook(500, 0.15, seed=11)) == list(textbook(500, 0.15, seed=11))
    assert all(int(answer) == asked(text).answer for text, answer in textbook(500, 0.0, seed=11))


def test_misprints_change_the_given_share_of_digits_and_never_the_length():
    rng = random.Random(5)
    printed = [misprint(185, 0.15, rng) for _ in range(20_000)]
    wrong = [sum(p[i] != "185"[i] for p in printed) / len(printed) for i in range(3)]
    assert {len(p) for p in printed} == {3}
    assert all(abs(w - 0.15) < 0.01 for w in wrong)  # standard error 0.0025
    assert abs(printed.count("185") / len(printed) - 0.85**3) < 0.015  # standard error 0.0034


def test_reward_of_right_wrong_and_malformed_answers():
    def say(text):
        return [{"role": "assistant", "content": text}]

    completions = [say("85"), say(" 85\n"), say("84"), say("85 86"), say("085"), say(""), [], say(None)]
    rewards = correct(completions=completions, answer=["85"] * 8, prompts=[], completion_ids=[])
    assert rewards == [1, 1, 0, 0, 0, 0, 0, 0]


def test_reward_refuses_lists_of_different_length():
    with pytest.raises(ValueError):
        correct(completions=[[]], answer=["1", "2"])


def test_model_and_tokenizer_load_and_are_what_the_readme_says(loaded):
    model, tokenizer = loaded
    assert model.config.model_type == "qwen3" and model.num_parameters() == 816_256
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_digits_are_single_tokens_and_any_text_survives(loaded):
    _, tokenizer = loaded
    ids = tokenizer("4738")["input_ids"]
    assert [tokenizer.decode([i]) for i in ids] == ["4", "7", "3", "8"]
    text = "Finde \\frac{1}{2} \u00fcber \u4e2d\u6587\n\n  def f(x): return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_prompts_are_short_and_a_longer_chat_keeps_its_prefix(loaded):
    _, tokenizer = loaded
    chat = rows("heldout.jsonl")[0]["prompt"]
    first = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert 12 <= len(first) <= 20
    longer = [*chat, {"role": "assistant", "content": "85"}, {"role": "user", "content": "What is 11 + 12?"}]
    second = tokenizer.apply_chat_template(longer, add_generation_prompt=True, return_dict=False)
    assert second[: len(first)] == first


def test_heldout_accuracy_before_training(loaded):
    """Sampled at temperature 1 about half right; greedy nearly always: what it lacks is confidence, not arithmetic."""
    import torch

    model, tokenizer = loaded
    chats, answers = zip(*[(row["prompt"], row["answer"]) for row in rows("heldout.jsonl")[:400]], strict=True)
    inputs = tokenizer.apply_chat_template(
        list(chats), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    score = {}
    for name, settings in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        torch.manual_seed(0)
        output = model.generate(**inputs, max_new_tokens=8, **settings)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        score[name] = sum(correct(completions, list(answers))) / len(answers)
    assert 0.40 <= score["sampled"] <= 0.65
    assert score["greedy"] >= 0.95

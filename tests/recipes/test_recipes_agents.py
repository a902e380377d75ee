"""The recipes with tools and environments: small, made as written, and their starting model knows the form of a call only."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from agrpo.config import compose
from agrpo.recipes.env_counter.environment import IncrementEnv
from agrpo.recipes.env_two.environments import ProductEnv
from agrpo.recipes.tools_calculator import corpus
from agrpo.recipes.tools_calculator.rewards import correct
from agrpo.recipes.tools_calculator.tools import calculate

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDER = RECIPES / "tools_calculator"


@pytest.fixture(scope="module")
def loaded():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER / "model")


def test_the_recipes_are_small():
    folders = [RECIPES / name for name in ("tools_calculator", "env_counter", "env_two")]
    paths = [p for folder in folders for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in paths) <= 2_000_000


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_the_question_files_are_what_the_script_writes_and_their_answers_are_right(name):
    text = (FOLDER / name).read_text()
    assert text == corpus.files()[name]
    for line in text.splitlines():
        row = json.loads(line)
        a, b = re.findall(r"\d+", row["prompt"][0]["content"])
        assert int(a) * int(b) == int(row["answer"])


def test_heldout_questions_are_in_no_conversation():
    _, heldout = corpus.split()
    asked = [m[0]["content"] for s, m in itertools.islice(corpus.conversations(5), 20_000) if "calculate" in str(s)]
    pairs = {tuple(map(int, re.findall(r"\d+", text))) for text in asked}
    assert len(pairs) > 4000 and not pairs & set(heldout) and len(set(heldout)) == 300


def test_the_calculator_calculates():
    assert [calculate("47 * 38"), calculate(" 9+1"), calculate("7 - 12")] == [1786, 10, -5]
    with pytest.raises(ValueError, match="two numbers"):
        calculate("__import__('os')")


def test_reward_of_right_wrong_and_unfinished_answers():
    def say(text, **more):
        return [{"role": "assistant", "content": text, **more}]

    unfinished = [*say("", tool_calls=[{}]), {"role": "tool", "content": "85"}]
    completions = [say("85"), say(" 85\n"), say("84"), say("85", tool_calls=[{}]), unfinished, say(None), []]
    assert correct(completions, ["85"] * 7, prompts=[]) == [1, 1, 0, 0, 0, 0, 0]


def test_the_environments_reward_their_task_and_share_it_by_seed():
    counter, product = IncrementEnv(), ProductEnv()
    assert counter.reset(group_seed=7) == IncrementEnv().reset(group_seed=7)
    assert {IncrementEnv().reset(group_seed=n)[-2] for n in range(100)} == set("123456")
    assert (counter.get_reward(), counter.increment(counter.target), counter.get_reward()) == (0, counter.target, 1)
    asked = product.reset(group_seed=7)
    a, b = map(int, re.findall(r"\d+", asked))
    assert asked == ProductEnv().reset(group_seed=7) and product.get_reward() == 0
    assert (product.calculate(f"{a} * {b}"), product.get_reward()) == (a * b, 1)
    product.calculate("1 + 1")
    assert product.get_reward() == 0 and product.reset(group_seed=7) == asked and product.get_reward() == 0


def test_a_conversation_as_the_recipe_renders_it_never_forks(loaded):
    """What the model reads while it is made is what it is asked in the run: prompts grow, calls are read back."""
    _, tokenizer = loaded
    from agrpo.env import calls
    from agrpo.env.conversation import Conversation
    from agrpo.sampler.vllm import Vllm

    player = Conversation(tools=["agrpo.recipes.tools_calculator.tools.calculate"]).open(tokenizer, Vllm(), 512)
    question = [{"role": "user", "content": "What is 47 * 38?"}]
    schemas, messages = next((s, m) for s, m in corpus.conversations(3) if "calculate" in str(s) and len(m) == 4)
    first = tokenizer.decode(player.render(question))
    shown = tokenizer.apply_chat_template(question, tools=schemas, add_generation_prompt=True, tokenize=False)
    assert first == shown
    text = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
    said = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    (call,) = calls.parse(tokenizer(said + "<|im_end|>", add_special_tokens=False)["input_ids"], tokenizer)[1]
    assert call["function"] == messages[1]["tool_calls"][0]["function"]
    asyncio.run(player.close())


@pytest.mark.parametrize(("recipe", "lowest", "highest"), [("tools_calculator", 0.1, 0.5), ("env_counter", 0.05, 0.4)])
def test_success_before_training(loaded, recipe, lowest, highest):
    """Sampled at temperature 1: what is left to learn is most of it, and there is something to learn from."""
    import torch

    from agrpo.config import build
    from agrpo.env.stitch import chains
    from agrpo.sampler.vllm import Vllm
    from agrpo.types import Prompt, Turn

    model, tokenizer = loaded
    player = build(compose([f"+recipe={recipe}"])["env"], "env").open(tokenizer, Vllm(), 512)
    torch.manual_seed(0)

    async def generate(ids, key):
        with torch.no_grad():
            output = model.generate(
                torch.tensor(ids, dtype=torch.long)[None], max_new_tokens=32, do_sample=True, top_k=0
            )
        said = output[0, len(ids) :].numpy().astype(np.int32)
        n, none = len(said), np.zeros((len(said), 0))
        return Turn(ids, said, np.zeros(n), np.ones(n, bool), np.zeros(n, int), none, none, None, "stop")

    async def play():
        found = []
        for n, line in enumerate((FOLDER / "heldout.jsonl").read_text().splitlines()[:60]):
            row = json.loads(line)
            prompt = Prompt(n, 0, row["prompt"] if recipe == "tools_calculator" else [], {})
            found.append((await player.play(prompt, generate, n, 0), row["answer"]))
        await player.close()
        return found

    played = asyncio.run(play())
    scores = [r.reward if r.rewards else correct([r.completion], [answer])[0] for r, answer in played]
    assert lowest <= sum(scores) / len(scores) <= highest
    assert sum(r.tool_call_count > 0 for r, _ in played) > 15
    assert sum(len(chains(r.turns)) == 1 for r, _ in played) >= 55

"""The examples of docs/own-rollouts.md work as they are written."""

import asyncio
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from agrpo.config import Devices, compose
from agrpo.env import resolve
from agrpo.env.stitch import stitch
from agrpo.launch.job import check
from agrpo.rollout.custom import open_custom
from agrpo.types import Prompt, Turn
from tests.standins import QUICKSTART

PAGE = (Path(__file__).parents[1] / "docs" / "own-rollouts.md").read_text()
MODULES = ("my_loop", "my_judge", "my_workflow")


@pytest.fixture
def examples(tmp_path, monkeypatch):
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, flags=re.S):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QUICKSTART)


def configured(folder, *overrides):
    return check(compose(["+recipe=quickstart", f"run.output_dir={folder}/run", *overrides]), Devices())[0]


async def says_85(ids, key, max_tokens=None, tokenizer=None):
    text = "85" if key[2] else "58"
    output = np.array([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], np.int32)
    n, heads = len(output), 8
    return Turn(
        np.asarray(ids, np.int32), output, np.full(n, -0.5, np.float32), np.ones(n, bool), np.full(n, 3, np.int32),
        np.tile(np.arange(heads, dtype=np.int32), (n, 1)), np.full((n, heads), -3.0, np.float32), None, "stop",
    )  # fmt: skip


def play(player, tokenizer):
    prompt = Prompt(0, 0, [{"role": "user", "content": "What is 47 + 38?"}], {"answer": "85"})

    async def generate(ids, key, max_tokens=None):
        return await says_85(ids, key, max_tokens, tokenizer)

    return asyncio.run(player.play(prompt, generate, 4, 0))


def test_the_loop_and_its_settings(examples, tokenizer):
    config = configured(examples, "rollout.loop=my_loop.Curriculum", "rollout.loop_config.pass_rate_cap=0.8")
    bound = open_custom(config, tokenizer, lambda: 0)
    asyncio.run(bound.setup(None))
    assert bound.loop.config.pass_rate_cap == 0.8 and bound.loop.config.rollout.group_size == 8
    prompt = Prompt(7, 0, [], {})
    assert bound.accepts(prompt, 9)
    bound.loop.pass_rates[7] = 0.9
    assert not bound.accepts(prompt, 9) and bound.state() is not None


def test_the_rollout_of_ones_own(examples, tokenizer):
    config = configured(examples, "rollout.loop=my_judge.SecondThought")
    player = resolve.open_player(config, tokenizer, 256, frozenset())
    rollout = play(open_custom(config, tokenizer, lambda: 0).player(player), tokenizer)
    (sample,) = stitch(rollout, 0.0, 4, 0)
    assert rollout.rewards == {"rollout": pytest.approx(1 / 3)} and sample.num_trained_tokens == 6


def test_the_workflow(examples, tokenizer):
    more = ("rollout.workflow=my_workflow.TwoTries", "rollout.workflow_kwargs={second: 0.25}", "scorer.functions=[]")
    config = configured(examples, *more)
    player = resolve.open_player(config, tokenizer, 256, frozenset())
    rollout = play(player, tokenizer)
    assert rollout.reward == 0.25 and rollout.row_offsets.tolist() == [-0.25, 0.0]
    assert [s.num_trained_tokens for s in stitch(rollout, 0.0, 4, 0)] == [3, 3]

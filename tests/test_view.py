"""`agrpo view` on files that the dump, the trainer's trace and the completion log wrote."""

import asyncio
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from agrpo.errors import ConfigError
from agrpo.report.view import Filter, view
from agrpo.rollout.completions import CompletionLog
from agrpo.rollout.dump import Dump
from agrpo.train.trace import Trace
from agrpo.types import Group, Prompt, Rollout, Turn
from tests.standins import QUICKSTART

PROMPT = Prompt(0, 0, [{"role": "user", "content": "What is 2 + 3?"}], {})


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QUICKSTART)


def turn(prompt_ids, output_ids, version):
    n = len(output_ids)
    return Turn(
        prompt_ids=np.array(prompt_ids, np.int32),
        output_ids=np.array(output_ids, np.int32),
        sampler_logprobs=np.full(n, -0.25, np.float32),
        output_mask=np.ones(n, np.bool_),
        versions=np.full(n, version, np.int32),
        head_ids=np.zeros((n, 0), np.int32),
        head_logprobs=np.zeros((n, 0), np.float32),
        candidates=None,
        finish_reason="stop",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder: group 7 with a single turn of reward 1 and two turns of reward 0, of which the first was trained."""
    folder, tok = tmp_path_factory.mktemp("run"), tokenizer()

    def ids(text):
        return tok(text, add_special_tokens=False)["input_ids"]

    asked = ids("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    five, no, six = (
        ids("5<|im_end|>"),
        ids("\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ids("6<|im_end|>"),
    )
    single = Rollout((turn(asked, five, 3),), [{"role": "assistant", "content": "5"}], rewards={"right": 1.0})
    double = Rollout(
        (turn(asked, six, 3), turn([*asked, *six, *no], six, 4)), [], rewards={"right": 0.0, "style": None}
    )
    group = Group(7, PROMPT, (single, double), 3)

    async def dump():
        sink = Dump(folder / "dump/exp/trial", tok)
        await sink.write(group, advantages=np.array([1.0, -1.0]))
        await sink.write(Group(-1, PROMPT, (single,), 3), is_eval=True)
        sink.close()

    asyncio.run(dump())
    row = SimpleNamespace(
        predicting_index=np.array([4, 3]), sample_index=np.array([0, 0]), group_ids=np.array([7]),
        rollout_indices=np.array([0]), target_ids=np.array(five[::-1], np.int32),
    )  # fmt: skip
    trace = Trace(folder, 0)
    trace.add(row, SimpleNamespace(trainer_logprobs=torch.tensor([-0.75, -0.26], requires_grad=True)))
    trace.write(12)
    config = {"rollout": {"dump_to_file": True, "fileroot": str(folder / "dump"), "experiment_name": "exp",
                          "trial_name": "trial"}, "model": {"path": str(QUICKSTART)}}  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def shown(folder, show=None, limit=50, tokens=False, **chosen):
    out = io.StringIO()
    view(folder, Filter(**chosen), show, limit, tokens, Console(file=out, width=160))
    return out.getvalue()


def test_the_list_names_every_rollout(run):
    text = shown(run)
    assert "7/0/0" in text and "7/1/1" in text and "2 rollouts, mean reward 0.500" in text
    assert "-1/0/0" not in text and "-1/0/0" in shown(run, scope="eval-rollout")


@pytest.mark.parametrize(
    "chosen, names",
    [
        ({"min_reward": 0.5}, ["7/0/0"]),
        ({"max_reward": 0.0}, ["7/1/1"]),
        ({"step": 12}, ["7/0/0"]),
        ({"group": 8}, []),
        ({"version": 4}, ["7/0/0", "7/1/1"]),
    ],
)
def test_filters(run, chosen, names):
    text = shown(run, **chosen)
    assert [n for n in ("7/0/0", "7/1/1") if n in text.split("rollouts")[0]] == names


def test_one_rollout_shows_what_trainer_and_sampler_disagree_on(run):
    text = shown(run, show="7/0")
    assert "trained in step 12" in text and "reward 1  (right 1)" in text and "2 of version 3" in text
    assert "mean abs 0.2550, max abs 0.5000" in text
    rows = [line.split() for line in text.splitlines() if line.split()[1:2] in (["'5'"], ["'<|im_end|>'"])]
    assert [r[1:] for r in rows] == [
        ["'5'", "3", "-0.2500", "-0.2600", "-0.0100"],
        ["'<|im_end|>'", "3", "-0.2500", "-0.7500", "-0.5000"],
    ]


def test_one_rollout_is_shown_segment_by_segment(run):
    text = shown(run, show="7/1/1", tokens=True)
    assert [line.split(" ")[0] for line in text.splitlines() if line.endswith(")") and line[0] in "pgc"] == [
        "prompt", "gen", "context", "gen",
    ]  # fmt: skip
    assert "style none" in text and "2 of version 3, 2 of version 4" in text


def test_a_folder_of_dumped_rollouts_is_read_without_its_run(run):
    assert "2 rollouts" in shown(run / "dump/exp/trial")


def test_a_run_that_logged_completions_shows_text(tmp_path):
    log = CompletionLog(tmp_path / "completions.jsonl")
    rollout = Rollout((), [{"role": "assistant", "content": "[5]"}], rewards={"right": 1.0})
    log.write(Group(3, PROMPT, (rollout, rollout), 2), np.array([0.5, 0.5]), "zero_std")
    log.close()
    config = {"rollout": {"dump_to_file": False}, "model": {"path": "none"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = shown(tmp_path)
    assert "3/1/0" in text and "zero_std" in text and "rollout.dump_to_file=true" in text
    assert "What is 2 + 3?" in shown(tmp_path, show="3/1") and "[5]" in shown(tmp_path, show="3/1")


def test_a_group_that_was_played_again_after_a_resume_is_shown_as_it_was_last(tmp_path):
    def group(number, text, count):
        rollout = Rollout((), [{"role": "assistant", "content": text}], rewards={"right": 1.0})
        return Group(number, PROMPT, (rollout,) * count, 2)

    for groups in ([group(3, "before", 3), group(4, "before", 3)], [group(4, "after", 2)]):
        log = CompletionLog(tmp_path / "completions.jsonl")
        for one in groups:
            log.write(one, None, None)
        log.close()
    config = {"rollout": {"dump_to_file": False}, "model": {"path": "none"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = shown(tmp_path)
    assert "5 rollouts" in text and "3/2/0" in text and "4/1/0" in text and "4/2/0" not in text
    assert text.count("after") == 2 and text.count("before") == 3


def test_a_dumped_group_that_was_played_again_by_another_version_is_shown_as_it_was_last(tmp_path):
    tok = tokenizer()
    before, after = (tok(text, add_special_tokens=False)["input_ids"] for text in ("12<|im_end|>", "7<|im_end|>"))

    def group(number, ids, version, reward):
        played = Rollout((turn([5, 6], ids, version),), [], rewards={"right": reward})
        return Group(number, PROMPT, (played, played), version)

    async def dump(groups, is_eval=False):
        sink = Dump(tmp_path, tok)
        for one in groups:
            await sink.write(one, is_eval=is_eval)
        sink.close()

    asyncio.run(dump([group(7, before, 5, 0.0), group(8, before, 5, 0.0)]))
    asyncio.run(dump([group(7, after, 4, 1.0)]))  # the checkpoint was of version 4
    asyncio.run(dump([group(8, after, 5, 1.0)]))
    text = shown(tmp_path)
    assert "4 rollouts, mean reward 1.000" in text and "12" not in text
    for version in (5, 4):  # each version has its own evaluation of the same prompts
        asyncio.run(dump([group(-1, after, version, 1.0)], is_eval=True))
    assert "4 rollouts" in shown(tmp_path, scope="eval-rollout")


def test_what_is_missing_is_said(tmp_path, run):
    with pytest.raises(ConfigError, match="not a folder"):
        shown(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no run"):
        shown(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps({"rollout": {"dump_to_file": False}, "model": {"path": "x"}}))
    with pytest.raises(ConfigError, match="rollout.dump_to_file=true rollout.fileroot=FOLDER"):
        shown(tmp_path)
    with pytest.raises(ConfigError, match="--show 9: no such rollout"):
        shown(run, show="9")

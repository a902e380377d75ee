"""The trajectory dump: records by hand, files on disk, and text that re-tokenises to the tokens it came from."""

import asyncio
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from agrpo.rollout.dump import Dump, records
from agrpo.types import Group, Prompt, Rollout, Turn

MODEL = Path(__file__).parents[2] / "recipes/quickstart/model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


class Numbers:
    """Token 7 is the text `7 `."""

    def decode(self, ids):
        return "".join(f"{int(i)} " for i in ids)


def turn(prompt_ids, output_ids, versions, mask=None):
    n = len(output_ids)
    return Turn(
        prompt_ids=np.array(prompt_ids, np.int32),
        output_ids=np.array(output_ids, np.int32),
        sampler_logprobs=np.linspace(-0.5, -0.1, n).astype(np.float32),
        output_mask=np.ones(n, np.bool_) if mask is None else np.array(mask, np.bool_),
        versions=np.array(versions, np.int32),
        head_ids=np.zeros((n, 0), np.int32),
        head_logprobs=np.zeros((n, 0), np.float32),
        candidates=None,
        finish_reason="stop",
    )


def group(*rollouts, group_id=42, version=5):
    return Group(group_id, Prompt(0, 0, [], {}), rollouts, version)


def dumped(folder, *groups, **options):
    async def run():
        dump = Dump(folder, Numbers(), **options)
        for g in groups:
            await dump.write(g)
        dump.close()

    asyncio.run(run())
    return {str(p.relative_to(folder)): [json.loads(line) for line in p.read_text().splitlines()]
            for p in sorted(folder.rglob("*.jsonl"))}  # fmt: skip


def test_a_single_turn_is_one_record():
    rollout = Rollout((turn([11, 12], [13, 14, 15], [5, 6, 6]),), [], rewards={"points": 1.0, "style": None})
    (line,) = records(group(rollout), Numbers(), advantages=np.array([0.5]))
    assert line == {
        "task_id": 42, "sample_idx": 0, "rollout_id": 0, "seqlen": 5, "prompt_len": 2, "head_version": 5,
        "tail_version": 6, "version_rle": [[5, 1], [6, 2]], "prompt": "11 12 ", "completion": "13 14 15 ",
        "token_ids": [11, 12, 13, 14, 15], "mask_rle": [[0, 2], [1, 3]], "sampler_logprobs": [-0.5, -0.3, -0.1],
        "reward": 1.0, "rewards": {"points": 1.0, "style": None}, "advantage": 0.5, "dropped": None,
    }  # fmt: skip


def test_turns_that_extend_each_other_are_one_record_with_segments():
    turns = (turn([11, 12], [13, 14], [5, 5]), turn([11, 12, 13, 14, 21, 22, 23], [15], [7]))
    (line,) = records(group(Rollout(turns, [], rewards={"points": 0.0})), Numbers())
    assert line["segments"] == [
        {"role": "prompt", "len": 2, "text": "11 12 "},
        {"role": "gen", "len": 2, "text": "13 14 "},
        {"role": "context", "len": 3, "text": "21 22 23 "},
        {"role": "gen", "len": 1, "text": "15 "},
    ]
    assert sum(s["len"] for s in line["segments"]) == line["seqlen"] == 8
    assert (line["prompt_len"], line["version_rle"]) == (2, [[5, 2], [7, 1]])
    assert line["completion"] == "13 14 21 22 23 15 "


def test_rows_that_end_in_context_or_train_nothing_are_kept():
    ends = turn([11], [12, 13, 14], [5, -1, -1], [True, False, False])
    none = turn([11], [12, 13], [-1, -1], [False, False])
    first, second = records(group(Rollout((ends, none), [], row_offsets=np.zeros(2))), Numbers())
    assert (first["seqlen"], first["prompt_len"], first["version_rle"]) == (4, 1, [[5, 1]])
    assert (second["prompt_len"], second["head_version"], second["tail_version"]) == (3, -1, -1)
    assert second["version_rle"] == [] and second["reward"] is None


def test_a_row_that_starts_with_an_answer_has_no_prompt_segment():
    begins = turn([], [12, 13, 14], [5, -1, 5], [True, False, True])
    (line,) = records(group(Rollout((begins,), [])), Numbers())
    assert [s["role"] for s in line["segments"]] == ["gen", "context", "gen"] and line["prompt"] == ""


def test_rows_with_rewards_of_their_own_and_forks_are_records_of_their_own():
    two = (turn([11], [12], [5]), turn([11, 12, 21], [13], [5]))
    own = Rollout(two, [], rewards={"agent": 1.0}, row_offsets=np.array([-0.25, 0.0]), has_reference=True)
    forked = Rollout((turn([11], [12], [5]), turn([31], [13], [5])), [], rewards={"agent": 0.5})
    failed = Rollout((), [], failure="error")
    lines = list(records(group(own, failed, forked), Numbers(), advantages=np.array([1.0, 2.0, 3.0])))
    assert [(x["sample_idx"], x["rollout_id"], x["reward"], x["advantage"]) for x in lines] == [
        (0, 0, 0.75, 1.0),
        (1, 0, 1.0, 2.0),
        (2, 2, 0.5, 3.0),
        (3, 2, 0.5, 3.0),
    ]
    assert lines[0]["rollout_reward"] == 1.0


def test_files_lie_under_the_newest_version_of_their_group(tmp_path):
    mixed = group(*(Rollout((turn([1], [2], [v]),), []) for v in (3, 5)))
    files = dumped(tmp_path, mixed, mixed, group(Rollout((turn([1], [2], [4]),), []), group_id=43))
    assert {name: [line["tail_version"] for line in lines] for name, lines in files.items()} == {
        "rollout/4/43.jsonl": [4],
        "rollout/5/42.jsonl": [3, 5, 3, 5],
    }


def test_only_the_newest_versions_are_kept(tmp_path):
    groups = [group(Rollout((turn([1], [2], [v]),), [])) for v in (8, 9, 10, 11)]
    assert list(dumped(tmp_path, *groups, keep_versions=2)) == ["rollout/10/42.jsonl", "rollout/11/42.jsonl"]


def test_a_write_that_fails_is_a_warning(tmp_path, caplog):
    (tmp_path / "rollout").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert dumped(tmp_path, group(Rollout((turn([1], [2], [3]),), []))) == {}
    assert "group 42 was not dumped" in caplog.text


def test_the_text_of_a_record_is_the_text_of_its_tokens(tokenizer):
    """Each piece of text, tokenised again, is the ids it came from; special tokens included."""
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("85<|im_end|>", "No, 86<|im_end|>")]
    between = tokenizer("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    second = [*first, *answers[0], *between]
    turns = (turn(first, answers[0], [1] * len(answers[0])), turn(second, answers[1], [2] * len(answers[1])))
    (line,) = records(group(Rollout(turns, [])), tokenizer)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert ids(line["prompt"]) + ids(line["completion"]) == line["token_ids"] == [*second, *answers[1]]
    assert [ids(s["text"]) for s in line["segments"]] == [first, answers[0], between, answers[1]]

"""Prompts from files and from `datasets`: what is accepted, and the line for what is not (DATA-1 to DATA-4, DATA-9)."""

import importlib.util
import json
import os
import time
from types import SimpleNamespace as Bag

import pytest

from agrpo.data.fingerprint import content_digest
from agrpo.data.hub import Hub
from agrpo.data.jsonl import Jsonl
from agrpo.errors import ConfigError

needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the hub extra")


def make_config(factory=None):
    return Bag(env=Bag(factory=factory), run=Bag(max_steps=None), rollout=Bag(workflow=None))


def make_row(i, **columns):
    return {"prompt": [{"role": "user", "content": f"What is {i} + {i}?"}], "answer": str(2 * i), **columns}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_rows_columns_and_fingerprint(tmp_path):
    path = write(tmp_path / "train.jsonl", [make_row(0), "", make_row(1, note="later column"), "  \r", make_row(2)])
    source = Jsonl(path=path)
    rows = source.open()
    assert source.problems(make_config()) == [] and source.columns() == ["prompt", "answer", "note"]
    assert len(rows) == 3
    assert [rows[i]["answer"] for i in range(3)] == ["0", "2", "4"]
    assert rows[1] == make_row(1, note="later column") and rows[2] == make_row(2, note=None)
    before = rows.fingerprint
    assert before == Jsonl(path=path).open().fingerprint and before.startswith("3-")
    os.utime(path, ns=(1, 1))
    assert Jsonl(path=path).open().fingerprint == before
    write(tmp_path / "train.jsonl", [make_row(0), make_row(1), make_row(3)])
    assert Jsonl(path=path).open().fingerprint != before


def test_a_folder_is_its_files_in_order_of_name(tmp_path):
    write(tmp_path / "b.jsonl", [make_row(5)])
    write(tmp_path / "a.jsonl", [make_row(3), make_row(4)])
    (tmp_path / "notes.txt").write_text("not data")
    rows = Jsonl(path=str(tmp_path)).open()
    assert [rows[i]["answer"] for i in range(len(rows))] == ["6", "8", "10"]


def test_missing_byte_order_mark_and_last_line_break(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(make_row(7)).encode() + b"\r\n" + json.dumps(make_row(8)).encode())
    rows = Jsonl(path=str(path)).open()
    assert [rows[0]["answer"], rows[1]["answer"]] == ["14", "16"]


ROW_FAULTS = [
    ("What is 2 + 2?", "prompt is a string; it must be a list of messages"),
    ([], "prompt is []; it must be a list of messages"),
    ({"role": "user"}, 'prompt is {"role": "user"}; it must be a list'),
    (["hello"], 'prompt has no message with a role at position 0: "hello"'),
    ([{"role": "user", "content": "a"}, {"content": "b"}], "prompt has no message with a role at position 1"),
    ([{"role": "user", "content": 7}], "prompt message 0 has content 7; it must be a string or a list of text blocks"),
    ([{"role": "user"}], "prompt message 0 has content null"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "prompt message 0 contains image_url content",
    ),
    ([{"role": "user", "content": [{"type": "mystery"}]}], "only text blocks are allowed"),
]


@pytest.mark.parametrize(("prompt", "text"), ROW_FAULTS)
def test_wrong_prompt_names_the_first_offending_row(tmp_path, prompt, text):
    path = write(tmp_path / "wrong.jsonl", [make_row(0), "", {"prompt": prompt}, {"prompt": "also wrong"}])
    found = Jsonl(path=path).problems(make_config())
    assert len(found) == 1 and found[0].startswith("data.path: wrong.jsonl line 3: ") and text in found[0]
    with pytest.raises(ConfigError) as caught:
        Jsonl(path=path).open()
    assert caught.value.problems == found


def test_text_blocks_and_tool_calls_are_messages(tmp_path):
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    assert Jsonl(path=write(tmp_path / "ok.jsonl", [{"prompt": prompt}])).problems(make_config()) == []


def test_file_faults_are_one_line_each(tmp_path):
    broken = [make_row(i) for i in range(20)]
    broken[16] = '{"prompt": [,}'
    broken[18] = "[1, 2]"
    found = Jsonl(path=write(tmp_path / "broken.jsonl", broken)).problems(make_config())
    assert len(found) == 2
    assert found[0].startswith("data.path: broken.jsonl line 17 is not valid JSON: ")
    assert found[1].startswith("data.path: broken.jsonl line 19 is not a JSON object")
    missing = Jsonl(path="missing.jsonl").problems(make_config())
    assert missing == ["data.path: missing.jsonl does not exist; give a JSONL file or a folder with *.jsonl files"]
    empty_folder = tmp_path / "empty"
    empty_folder.mkdir()
    assert "contains no *.jsonl file" in Jsonl(path=str(empty_folder)).problems(make_config())[0]
    assert "holds no rows" in Jsonl(path=write(tmp_path / "none.jsonl", ["", " "])).problems(make_config())[0]
    # What could not be read has no columns to miss: no second line that reward functions lack some.
    assert Jsonl(path=str(tmp_path / "none.jsonl")).columns() is None and Jsonl(path=str(tmp_path / "broken.jsonl")).columns()
    not_text = tmp_path / "bytes.jsonl"
    not_text.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    assert "line 1" in Jsonl(path=str(not_text)).problems(make_config())[0]


def test_no_prompt_column_names_what_was_found(tmp_path):
    path = write(tmp_path / "chat.jsonl", [{"messages": [], "label": 1}])
    found = Jsonl(path=path).problems(make_config())
    assert found[0].startswith("data.path: ") and "has no column `prompt` (columns found: messages, label)" in found[0]
    assert Jsonl(path=path).problems(make_config(factory="my.Env")) == []
    assert Jsonl(path=path).open(needs_prompt=False)[0] == {"messages": [], "label": 1, "prompt": []}
    with pytest.raises(ConfigError):
        Jsonl(path=path).open()


def test_a_single_row_without_prompt_is_named(tmp_path):
    path = write(tmp_path / "gap.jsonl", [make_row(0), {"answer": "4"}])
    assert "gap.jsonl line 2 has no prompt" in Jsonl(path=path).problems(make_config())[0]


def test_start_up_check_is_fast(tmp_path):
    path = write(tmp_path / "large.jsonl", [make_row(i, filler="x" * 200) for i in range(50_000)])
    started = time.perf_counter()
    assert Jsonl(path=path).problems(make_config()) == []
    first = time.perf_counter() - started
    assert len(Jsonl(path=path).open()) == 50_000
    assert first < 3.0 and time.perf_counter() - started - first < 0.2


@needs_datasets
def test_datasets_reads_files_folders_and_saved_sets(tmp_path):
    import datasets

    rows = [make_row(i) for i in range(7)]
    path = write(tmp_path / "one.jsonl", rows)
    source = Hub(path=path)
    opened = source.open()
    assert source.problems(make_config()) == [] and source.columns() == ["prompt", "answer"]
    assert [opened[i] for i in range(len(opened))] == rows
    parquet = tmp_path / "one.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(parquet))
    saved = tmp_path / "saved"
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:2])}
    ).save_to_disk(str(saved))
    for other in (Hub(path=str(parquet)).open(), Hub(path=str(saved)).open()):
        assert len(other) == 7 and other.fingerprint == opened.fingerprint and other[3] == rows[3]
    assert len(Hub(path=str(saved), split="test").open()) == 2
    stream = Hub(path=path, streaming=True).open()
    assert [row["answer"] for row in stream] == [row["answer"] for row in rows] and not hasattr(stream, "__len__")


@needs_datasets
def test_the_fingerprint_is_of_every_value_and_of_nothing_else(tmp_path):
    import datasets

    def table(**changes):
        rows = [{"prompt": [{"role": "user", "content": str(i)}], "answer": i, "hint": None if i % 3 else [0.5, i]} for i in range(2503)]
        rows[1734].update(changes)
        return datasets.Dataset.from_list(rows)

    plain = table()
    assert content_digest(plain) == content_digest(table())
    in_pieces = datasets.concatenate_datasets([plain.select(range(701)), plain.select(range(701, 2503))])
    assert content_digest(in_pieces.select_columns(["hint", "answer", "prompt"])) == content_digest(plain)
    as_saved = in_pieces.cast_column("answer", datasets.Value("int16"))
    assert content_digest(as_saved) == content_digest(plain)
    others = [{"answer": 7}, {"answer": None}, {"hint": None}, {"hint": []}, {"hint": [0.5, 7.0]}]
    others += [{"prompt": [{"role": "user", "content": text}]} for text in ("1733", "", None)]
    found = [content_digest(table(**change)) for change in others]
    assert len({content_digest(plain), content_digest(plain.select(range(2502))), *found}) == len(others) + 2


@needs_datasets
def test_datasets_faults_are_one_line_each(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", [make_row(0)])
    write(folder / "test.jsonl", [make_row(0)])
    assert Hub(path=str(folder), split="validation").problems(make_config()) == [
        f"data.split: validation is not a split of {folder}; allowed: train, test"
    ]
    assert Hub(path=str(folder), name="other").problems(make_config()) == [
        f"data.name: other is not a configuration of {folder}; allowed: default"
    ]
    assert "does not exist" in Hub(path="./nowhere").problems(make_config())[0]
    assert "does not exist" in Hub(path="nowhere.parquet").problems(make_config())[0]
    assert (
        "data.shuffle must be false" in Hub(path=str(folder), streaming=True, shuffle=True).problems(make_config())[0]
    )
    assert Hub(path="some-owner/some-data").problems(make_config()) == []  # looked at when it is opened
    text = write(tmp_path / "text.jsonl", [{"prompt": "2 + 2?"}, {"prompt": "3 + 3?"}])
    assert "row 0: prompt is a string" in Hub(path=text).problems(make_config())[0]
    other = write(tmp_path / "other.jsonl", [{"question": "2 + 2?"}])
    assert "has no column `prompt` (columns found: question)" in Hub(path=other).problems(make_config())[0]
    assert Hub(path=other).problems(make_config(factory="my.Env")) == []
    image = write(
        tmp_path / "image.jsonl", [{"prompt": [{"role": "user", "content": [{"type": "image", "text": None}]}]}]
    )
    assert "contains image content" in Hub(path=image).problems(make_config())[0]


@needs_datasets
def test_null_keys_of_a_table_do_not_reach_the_messages(tmp_path):
    rows = [make_row(0), {"prompt": [{"role": "user", "content": "x", "name": "ann"}], "answer": "1"}]
    opened = Hub(path=write(tmp_path / "mixed.jsonl", rows)).open()
    assert opened[0]["prompt"] == rows[0]["prompt"] and opened[1]["prompt"] == rows[1]["prompt"]

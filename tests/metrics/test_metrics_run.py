"""One whole run with tools, environments, two rewards, a filter of groups, an evaluation and callbacks: all it logs."""

from __future__ import annotations

import json

import pytest

from tests import metric_list
from tests.test_run import agrpo, records_of

OWN = """
def odd(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def accept(group):
    accept.calls += 1
    return accept.calls % 5 > 0


accept.calls = 0
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run's folder and what it printed."""
    folder = tmp_path_factory.mktemp("everything")
    (folder / "own_parts.py").write_text(OWN)
    run = folder / "run"
    done = agrpo(
        folder, "+recipe=env_two", "run.max_steps=50", "packer.token_budget=1024", "eval.tasks.num_rollouts=1",
        "scorer.functions=[own_parts.odd]", "rollout.accept_fn=own_parts.accept", "rollout.max_staleness=1",
        "run.callbacks=[tests.train.callback_samples.write_lines]", "logger.log_completions=true",
        "logger.num_completions_to_print=2", f"run.output_dir={run}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return run, done.stdout


def test_every_metric_is_there_with_values_of_its_unit(finished):
    records = records_of(finished[0])
    kinds = ("tools", "environment", "accept", "eval", "centering", "tail", "terminated")
    assert metric_list.absent(records, *kinds) == [] and metric_list.outside(records) == []
    names = {name for record in records for name in record}
    assert {"rewards/odd/mean", "rewards/IncrementEnv/mean", "rewards/ProductEnv/mean"} <= names


def test_generated_tokens_add_up(finished):
    run, _ = finished
    records, tokens = records_of(run), json.loads((run / "summary.json").read_text())["tokens"]

    def logged(name: str) -> float:
        return sum(record.get(name, 0) for record in records)

    assert tokens["unaccounted"] == 0 and tokens["restored"] == 0
    assert tokens["trained"] == logged("tokens/trained") == logged("batch/trained_tokens_per_step")
    gone = tokens["trained"] + sum(tokens["discarded"].values()) + tokens["untrained"] + tokens["in_flight"]
    assert tokens["generated"] == gone >= logged("tokens/generated") > 0
    assert tokens["discarded"]["rejected"] >= logged("tokens/discarded/rejected") > 0


def test_callbacks_are_called_in_order_and_one_of_them_ends_the_run(finished):
    run, _ = finished
    lines = (run / "events.txt").read_text().splitlines()
    step = ["on_step_begin {0}", "on_sync {1}", "on_log {1}", "on_step_end {1}"]
    first, second = ([line.format(i, i + 1) for line in step] for i in (0, 1))
    first.insert(3, "on_evaluate 1")  # the one at the start comes with the first record
    assert lines[:10] == ["on_train_begin 0", *first, *second]
    assert lines[10:] == ["on_save 2", "on_log 2", "on_evaluate 2", "on_train_end 2"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_reason"] == "stopped by a callback" and summary["global_step"] == 2
    assert (run / "model").exists()


def test_each_record_is_followed_by_its_rollouts(finished):
    run, out = finished
    lines = out.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("step 1/50")][0]
    assert all(line.startswith('  "') and " -> " in line and "odd " in line for line in lines[at + 1 : at + 3])
    assert not lines[at + 3].startswith('  "')
    assert len((run / "completions.jsonl").read_text().splitlines()) > 4
    assert any(line.startswith("tokens  ") for line in lines)

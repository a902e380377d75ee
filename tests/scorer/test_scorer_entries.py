"""Entries that can and cannot be used, each with its one line (REW-9 to REW-13)."""

from types import SimpleNamespace as Bag

import pytest

from agrpo.errors import ConfigError
from agrpo.scorer.functions import Functions

S = "reward_samples."


def problems(functions, columns=("prompt", "answer"), factory=None):
    config = Bag(
        data=Bag(columns=lambda: None if columns is None else list(columns)),
        env=Bag(factory=factory),
        rollout=Bag(workflow=None, loop=None),
    )
    return Functions(functions=functions).problems(config)


def test_names_follow_function_partial_and_class_with_suffixes():
    entries = [
        S + "token_count",
        {"_target_": S + "returns", "values": [1]},
        {"_target_": S + "Threshold", "limit": 2},
        {"_target_": S + "Threshold", "limit": 5},
        S + "token_count",
        S + "token_count",
    ]
    resolved = Functions(functions=entries).resolve()
    assert [name for name, _ in resolved] == [
        "token_count",
        "returns",
        "Threshold",
        "Threshold_2",
        "token_count_2",
        "token_count_3",
    ]
    assert [name for name, _ in Functions(functions=S + "token_count").resolve(taken=["token_count"])] == [
        "token_count_2"
    ]
    assert resolved[2][1](completion_ids=[[1, 2], [1, 2, 3]]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("nowhere.at.all", "nowhere.at.all cannot be imported: No module named 'nowhere'; is its folder on PYTHONPATH?"),
        (S + "tokencount", "reward_samples.tokencount cannot be imported: reward_samples has no 'tokencount'; did you mean token_count?"),
        ("reward_broken.score", "reward_broken.score cannot be imported: reward_broken raised RuntimeError: half a module"),
        ("reward_needs_missing.score", "reward_needs_missing.score cannot be imported: No module named 'not_there'"),
        (S + "anonymous", "reward_samples.anonymous is a lambda"),
        (S + "local", "reward_samples.local is local (make_local.<locals>.inner)"),
        (S + "number", "reward_samples.number is not callable (int)"),
        ({"_target_": S + "NotCallable"}, "reward_samples.NotCallable is not callable (NotCallable)"),
        (S + "Threshold", "reward_samples.Threshold is a class; write {_target_: reward_samples.Threshold, <arguments>}"),
        ({"_target_": S + "Threshold", "limit": -1}, "cannot be built: ValueError: limit must not be negative"),
        ("Qwen/Qwen3-Reward", "Qwen/Qwen3-Reward looks like a model; reward models are not loaded; serve the model on its own"),
        ("token_count", "token_count is not an import path; give pkg.mod.name"),
        (7, "entry 7 is int; give an import path"),
        ({"limit": 2}, "has no _target_"),
        ({"_target_": S + "graded", "lmit": 4}, "reward_samples.graded has no parameter lmit; did you mean limit?"),
        ({"_target_": S + "token_count", "weight": 2}, "reward_samples.token_count has no parameter weight; it has none"),
        ({"_target_": S + "no_keywords", "weight": 2}, "reward_samples.no_keywords has no parameter weight"),
        (S + "wants_reference", "requires `reference`, which is neither a standard argument (prompts, completions, completion_ids) nor a data column (answer)"),
        (S + "no_keywords", "does not accept answer, completion_ids, prompts"),
        (S + "by_position", "takes completions by position only"),
    ],
)  # fmt: skip
def test_unusable_entry_gets_one_line(entry, line):
    found = problems([entry])
    assert len(found) == 1 and line in found[0] and found[0].startswith("scorer.functions: ") and "\n" not in found[0]


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("Forgetful", {"lmit": 2}, "has no parameter lmit; did you mean limit?"),
        ("Forgetful", {"weight": 2}, "has no parameter weight; it has limit"),
        ("HandsOn", {"lmit": 2}, "has no parameter lmit; did you mean limit?"),  # handed on to one that forgets it
        ("HandsOn", {"limit": 2, "scale": 3}, None),
        ("Keeps", {"url": "http://x", "timeout": 3}, None),  # what it does with its rest is its own matter
        ("Strict", {"lmit": 2}, "cannot be built: TypeError"),
    ],
)
def test_a_misspelt_argument_of_a_class_is_refused_where_nothing_reads_it(name, arguments, line):
    found = problems([{"_target_": S + name, **arguments}])
    assert found == [] if line is None else len(found) == 1 and line in found[0]


def test_all_faulty_entries_are_reported_together():
    found = problems([S + "number", S + "token_count", "nowhere.at.all"])
    assert len(found) == 2
    with pytest.raises(ConfigError) as caught:
        Functions(functions=[S + "number", "nowhere.at.all"]).resolve()
    assert len(caught.value.problems) == 2


def test_required_parameter_is_checked_only_against_known_columns():
    assert problems([S + "wants_reference"], columns=None) == []
    assert problems([S + "wants_reference"], columns=["prompt", "reference"]) == []
    assert problems(["agrpo.scorer.rewards.accuracy_reward"], columns=["prompt", "solution"]) == []


def test_some_source_of_reward_is_required():
    assert "scorer.functions is empty and nothing else gives rewards" in problems([])[0]
    assert problems([], factory="my.Env") == []


def test_reward_range_is_ordered():
    config = Bag(data=Bag(columns=lambda: []), env=Bag(), rollout=Bag())
    found = Functions(functions=S + "token_count", reward_range=[1.0, 0.0]).problems(config)
    assert found == ["scorer.reward_range must be [lowest, highest] with lowest < highest, got [1.0, 0.0]"]

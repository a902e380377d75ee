"""Order of prompts, generated problems, and no data (DATA-3, DATA-5, DATA-6, ENV-14, RES-6)."""

import importlib.util
from types import SimpleNamespace as Bag

import pytest

from agrpo.data.none import NoData
from agrpo.data.prompts import permutation, prompts_of
from agrpo.data.reasoning_gym import ReasoningGym
from agrpo.errors import ContractError

needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the gym extra")


class Rows(list):
    fingerprint = "test"


class Stream:
    fingerprint = "stream"

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def make_rows(n):
    return Rows({"prompt": [{"role": "user", "content": str(i)}], "answer": i} for i in range(n))


def test_data_order_and_epochs():
    prompts = prompts_of(make_rows(7), shuffle=False, seed=1)
    found = [prompts.prompt_of(g) for g in range(21)]
    assert [p.row_index for p in found] == [*range(7)] * 3
    assert [p.epoch for p in found] == [0] * 7 + [1] * 7 + [2] * 7
    assert found[10].messages == [{"role": "user", "content": "3"}] and found[10].columns == {"answer": 3}


def test_shuffled_epochs_visit_every_row_once_and_depend_on_seed_and_epoch_only():
    orders = {}
    for seed in (0, 1, 2**32 - 1):
        prompts = prompts_of(make_rows(101), shuffle=True, seed=seed)
        forward = [prompts.prompt_of(g).row_index for g in range(303)]
        backward = [prompts_of(make_rows(101), True, seed).prompt_of(g).row_index for g in reversed(range(303))]
        assert forward == backward[::-1]
        for epoch in range(3):
            part = forward[101 * epoch : 101 * (epoch + 1)]
            assert sorted(part) == list(range(101))
            orders[seed, epoch] = tuple(part)
    assert len(set(orders.values())) == 9


def philox_words(number, key):
    """Philox4x64-10 of Salmon et al. (2011), counters 1, 2, ..., in plain integers."""
    mask, words = 2**64 - 1, []
    for counter in range(1, number // 4 + 2):
        c, k = [counter, 0, 0, 0], list(key)
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(high >> 64) ^ c[1] ^ k[0], high & mask, (low >> 64) ^ c[3] ^ k[1], low & mask]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        words += c
    return words[:number]


def test_order_is_the_same_on_every_machine_and_release():
    words = philox_words(23, key=(3, 5))
    assert permutation(23, seed=3, epoch=5).tolist() == sorted(range(23), key=words.__getitem__)
    assert permutation(7, seed=3, epoch=5).tolist() == [0, 6, 2, 1, 3, 4, 5]


def test_stream_gives_the_next_row_to_each_new_group_and_starts_again():
    prompts = prompts_of(Stream(make_rows(3)), shuffle=False, seed=0)
    first = [prompts.prompt_of(g) for g in (40, 41, 43, 42)]
    assert [p.row_index for p in first] == [0, 1, 2, 0] and [p.epoch for p in first] == [0, 0, 0, 1]
    assert prompts.prompt_of(41) is first[1]


def test_stream_faults_are_contract_errors():
    with pytest.raises(ContractError, match="row 1 of the stream: prompt is a string"):
        prompts = prompts_of(Stream([{"prompt": [{"role": "user", "content": "x"}]}, {"prompt": "text"}]), False, 0)
        [prompts.prompt_of(g) for g in range(2)]
    with pytest.raises(ContractError, match="holds no rows"):
        prompts_of(Stream([]), False, 0).prompt_of(0)


def test_without_data_prompts_never_end():
    prompts = prompts_of(NoData().open(), shuffle=False, seed=0)
    assert prompts.prompt_of(10**9).messages == [] and prompts.prompt_of(10**9).epoch == 0


def test_without_data_an_environment_and_a_last_step_are_required():
    def found(factory, max_steps):
        where = Bag(env=Bag(factory=factory), run=Bag(max_steps=max_steps), rollout=Bag(workflow=None))
        return NoData().problems(where)

    assert found("my.Env", 5) == []
    assert [line.split(" ")[0] for line in found(None, None)] == ["env.factory", "run.max_steps"]
    assert "single environment" in found({"a": "my.Env"}, 5)[0]
    assert found("my.Env", None)[0].startswith("run.max_steps must be set (>= 1) without a data set")


@needs_gym
def test_generated_problems_repeat_and_carry_their_answer():
    source = ReasoningGym(
        dataset="chain_sum",
        config={"min_terms": 2, "max_terms": 2},
        size=11,
        system="Be brief.",
        template="Q: {question} A:",
    )
    rows, again = source.open(), source.open()
    assert (
        len(rows) == 11
        and rows.fingerprint == again.fingerprint
        and [rows[i] for i in range(11)] == [again[i] for i in range(11)]
    )
    row = rows[4]
    assert list(row) == source.columns()
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Q: {row['question']} A:"},
    ]
    expression = row["metadata"]["expression"]
    assert int(row["answer"]) == int(row["solution"]) == eval(expression)
    other = ReasoningGym(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=11, generator_seed=1).open()
    assert other.fingerprint != rows.fingerprint and other[4]["question"] != row["question"]


@needs_gym
def test_generator_faults_are_one_line_each():
    assert "nearest: chain_sum" in ReasoningGym(dataset="chainsum").problems(None)[0]
    assert "chain_sum refuses" in ReasoningGym(dataset="chain_sum", config={"min_termz": 2}).problems(None)[0]
    assert "min_terms must be positive" in ReasoningGym(dataset="chain_sum", config={"min_terms": -1}).problems(None)[0]
    assert (
        "data.template must contain {question}" in ReasoningGym(dataset="chain_sum", template="hello").problems(None)[0]
    )
    assert ReasoningGym(dataset="chain_sum").problems(None) == []

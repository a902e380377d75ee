"""Advantages against hand-computed numbers and the reference table; drop rules; refusals."""

from types import SimpleNamespace as Bag

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agrpo.advantage import Grouped, Overlong, checked, normalise
from agrpo.errors import ContractError
from agrpo.schema import violations
from agrpo.types import Group, Prompt, Rollout, Turn

NAN = float("nan")


def make_group(rewards, tokens=5, failed=()):
    none = np.zeros((tokens, 0), np.int32)
    turn = Turn(
        np.zeros(2, np.int32), np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), np.ones(tokens, bool),
        np.zeros(tokens, np.int32), none, none.astype(np.float32), None, "stop",
    )  # fmt: skip
    rollouts = tuple(
        Rollout((turn,), [], rewards={"f": reward}, failure="timeout" if slot in failed else None)
        for slot, reward in enumerate(rewards)
    )
    return Group(0, Prompt(0, 0, [], {}), rollouts, 0)


def config(group_size=8, minimum=None, limit=2048):
    rollout = Bag(group_size=group_size, min_usable_group_size=minimum)
    return Bag(rollout=rollout, sampler=Bag(max_completion_length=limit))


def advantages_of(grouped, rewards, **settings):
    return grouped.of(grouped.scores(make_group(rewards, **settings), 2048))


def test_default_advantage():
    found = advantages_of(Grouped(), [1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(found, [1.7320508, -0.5773503, -0.5773503, -0.5773503], rtol=1e-6)
    assert found.dtype == np.float64


def test_unusable_rollouts_are_absent_and_unscorable_ones_are_zero():
    found = advantages_of(Grouped(), [1.0, None, 0.0, 9.0], failed=[3])
    np.testing.assert_allclose(found, [1.0, 0.0, -1.0], rtol=1e-6)


TABLE = [
    ([1, 0, 1, 0], None, None, dict(unbiased=True, eps=1e-5), [0.86601, -0.86601, 0.86601, -0.86601]),
    ([1, 0, 1], None, None, dict(unbiased=True, eps=1e-5), [0.57734, -1.15468, 0.57734]),
    ([1, 2, 3], [2, 1], [1, 3], dict(eps=0), [-1, 0, 1]),
    ([1, 2, 3], [2, 1], [1, 3], dict(eps=0, unbiased=True), [-0.70711, 0, 0.70711]),
    ([1, 2, 3], [2, 1], [1, 3], dict(eps=0, leave_one_out=True), [-1, -0.5, 1]),
    ([1, 2, 3], [2, 1], [1, 3], dict(eps=0, leave_one_out=True, unbiased=True), [-0.70711, -0.35355, 0.70711]),
    ([0.81, 0.9, 1, 0, 0], [3, 2], [1, 0], dict(eps=1e-5), [0.61999, 0.79998, 0.99998, -0.99998, -0.99998]),
    ([0.5, 0.8, 1], [2, 1], [1, 1], dict(eps=1e-5), [-0.5, -0.2, 0]),
    ([1, 3], [1, 1], None, dict(eps=0), [-1, 1]),
    ([1, 1, 1, 3], [3, 1], None, dict(eps=0), [-1, -1, -1, 1]),
    ([1, 3, 3, 3, 3], [1, 4], None, dict(eps=0), [-1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("rewards", "counts", "references", "settings", "expected"), TABLE)
def test_reference_table(rewards, counts, references, settings, expected):
    found = normalise(
        rewards, row_counts=counts, references=references, mean_level="group", std_level="group", **settings
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_levels_are_independent():
    rewards, sizes = np.array([1.0, 1.0, 5.0, 5.0]), np.array([2, 2])
    # Around the batch mean 3, each group deviates by 2.
    found = normalise(rewards, mean_level="batch", std_level="group", eps=0, group_sizes=sizes)
    np.testing.assert_allclose(found, [-1, -1, 1, 1])
    np.testing.assert_allclose(
        normalise(rewards, mean_level="batch", std_level=None, group_sizes=sizes), [-2, -2, 2, 2]
    )
    np.testing.assert_allclose(normalise(rewards, mean_level=None, std_level="batch", eps=0), rewards / 2)
    np.testing.assert_allclose(normalise(rewards, mean_level=None, std_level=None), rewards)
    uneven = normalise([1.0, 3.0, 0.0, 0.0, 6.0], mean_level="group", std_level=None, group_sizes=[2, 3])
    np.testing.assert_allclose(uneven, [-1, 1, -2, -2, 4])


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9), st.booleans(), st.booleans())
def test_matches_a_plain_derivation(rewards, leave_one_out, unbiased):
    values, n = np.array(rewards, np.float64), len(rewards)
    base = np.array([np.delete(values, i).mean() if leave_one_out else values.mean() for i in range(n)])
    std = np.sqrt(((values - base) ** 2).sum() / (n - 1 if unbiased else n))
    if 0 < std < 1e-6:
        return  # the choice of divisor hangs on the last digit
    expected = (values - base) / (std + 1e-8 if std > 1e-8 else 1.0)
    settings = dict(mean_level="group", std_level="group", leave_one_out=leave_one_out, unbiased=unbiased, eps=1e-8)
    np.testing.assert_allclose(normalise(values, **settings), expected, rtol=1e-6, atol=1e-9)


def test_constant_rewards_give_exactly_zero():
    for value in (0.1, 0.3, 1e6 / 3):
        for number in (2, 3, 7):
            assert (advantages_of(Grouped(), [value] * number) == 0).all()
            at_once = Grouped(mean_level=None, std_level=None, rollout_time_norm=True)
            assert (advantages_of(at_once, [value] * number) == 0).all()


def test_zero_std_tolerance():
    sums = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6])
    assert np.ptp(sums) > 0
    assert Grouped().is_zero_std(sums)
    assert not Grouped(zero_std_tolerance=0).is_zero_std(sums)
    assert Grouped(zero_std_tolerance=0).is_zero_std(np.array([0.5, 0.5, NAN]))
    assert Grouped().is_zero_std(np.array([1e6, 1e6 + 0.5])) and not Grouped().is_zero_std(np.array([0.0, 0.5]))


@pytest.mark.parametrize(
    ("settings", "rewards", "reason"),
    [
        ({}, [1, 0], None),
        ({}, [1, 1, 1], "zero_std"),
        ({}, [1, NAN, 1], "zero_std"),
        ({}, [1, NAN, NAN], "under_scored"),
        ({}, [NAN, NAN], "under_scored"),
        ({}, [], "under_scored"),
        ({"drop_zero_std": False}, [1, 1], None),
        ({"drop_zero_std": False}, [NAN, NAN], "under_scored"),
        ({"mean_level": None, "std_level": None}, [1, 1], None),
        ({"mean_level": None, "std_level": None}, [1, NAN], None),
        ({"mean_level": "batch", "std_level": "batch"}, [1, 1], None),
        ({"mean_level": None, "std_level": None, "rollout_time_norm": True}, [1, 1], "zero_std"),
    ],
)
def test_drop_reason(settings, rewards, reason):
    assert Grouped(**settings).drop_reason(np.array(rewards, np.float64)) == reason


def test_rewards_are_shifted_scaled_and_clipped_in_that_order():
    shaped = Grouped(reward_bias=-0.5, reward_scaling=10, reward_clip=4)
    np.testing.assert_allclose(shaped.scores(make_group([1.0, 0.75, None]), 2048).rows, [4.0, 2.5, NAN])


def test_overlong_penalty():
    zone = Overlong(enabled=True, tokens=4, factor=2.0)
    np.testing.assert_allclose(zone.penalty(np.array([5, 6, 8, 10]), 10), [0.0, 0.0, -1.0, -2.0])
    scores = Grouped(overlong=zone).scores(make_group([1.0, 0.0], tokens=9), 10)
    np.testing.assert_allclose(scores.references, [-0.5, -1.5])
    assert not Grouped(overlong=Overlong()).overlong.penalty(np.array([10]), 10).any()


def test_rollout_time_normalisation_is_the_population_one():
    at_once = Grouped(mean_level=None, std_level=None, rollout_time_norm=True)
    found = advantages_of(at_once, [1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(found, [1.7320508, -0.5773503, -0.5773503, -0.5773503], rtol=1e-6)


def test_minimum_usable_rollouts():
    assert Grouped().minimum_usable(8, None) == 2 and Grouped().minimum_usable(1, None) == 1
    assert Grouped(mean_level="batch", std_level="batch").minimum_usable(8, None) == 1
    assert Grouped().minimum_usable(8, 5) == 5


def test_result_of_an_advantage_function_is_checked():
    rewards = np.array([1.0, NAN, 0.0])
    np.testing.assert_array_equal(checked([2, 5, -2], rewards, "mine"), [2.0, 0.0, -2.0])
    np.testing.assert_array_equal(checked([2, NAN, -2], rewards, "mine"), [2.0, 0.0, -2.0])
    for wrong, text in (
        ([1, 2], "mine must return 3 values"),
        ([NAN, 0, 0], "non-finite"),
        ([1, 0, np.inf], "non-finite"),
        (["a", 0, 0], "must return one number per rollout"),
        (None, "mine must return 3 values"),
    ):
        with pytest.raises(ContractError, match=text):
            checked(wrong, rewards, "mine")


@pytest.mark.parametrize(
    ("settings", "where", "line"),
    [
        ({}, config(group_size=1), "rollout.group_size must be >= 2, got 1"),
        ({}, config(minimum=1), "rollout.min_usable_group_size must be >= 2 with group statistics, got 1"),
        ({}, config(minimum=9), "rollout.min_usable_group_size must be in [1, 8] (rollout.group_size), got 9"),
        ({"rollout_time_norm": True}, config(), "advantage.rollout_time_norm=true normalises rewards already"),
        ({"reward_scaling": 0.0}, config(), "advantage.reward_scaling must be finite and not 0, got 0.0"),
        ({"reward_bias": float("inf")}, config(), "advantage.reward_bias must be finite, got inf"),
        ({"overlong": Overlong(enabled=True)}, config(), "advantage.overlong.tokens must be set"),
        (
            {"overlong": Overlong(enabled=True, tokens=65)},
            config(limit=64),
            "advantage.overlong.tokens must be in [1, 64]",
        ),
    ],
)
def test_refusals(settings, where, line):
    found = Grouped(**settings).problems(where)
    assert len(found) == 1 and found[0].startswith(line)


def test_accepted_settings():
    assert Grouped().problems(config()) == [] and Grouped().problems(config(minimum=2)) == []
    none = Grouped(mean_level=None, std_level=None)
    assert none.problems(config(group_size=1)) == [] and none.problems(config(minimum=1)) == []
    assert Grouped(drop_zero_std=False).problems(config(group_size=1)) == []
    assert violations(Grouped(), "advantage") == []
    assert violations(Grouped(eps=-1.0, mean_level="prompt"), "advantage") == [
        "advantage.mean_level must be one of group, batch, null, got 'prompt'",
        "advantage.eps must be >= 0, got -1.0",
    ]

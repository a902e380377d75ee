"""Advantages against hand-computed numbers and the reference table; drop rules; refusals."""

from types import SimpleNamespace as Bag

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agrpo.advantage import Grouped, Overlong, checked, normalise, over_tokens
from agrpo.errors import ContractError
from agrpo.schema import violations
from agrpo.types import Group, Prompt, ReadyGroup, Rollout, Sample, Turn

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


def row(trained, total=5):
    none = np.zeros((total, 0), np.int32)
    mask = np.arange(total) < trained
    return Turn(
        np.zeros(2, np.int32), np.zeros(total, np.int32), np.zeros(total, np.float32), mask, np.zeros(total, np.int32),
        none, none.astype(np.float32), None, "stop",
    )  # fmt: skip


def rows_group(*rollouts):
    """(reward of the rollout, offsets of its rows, trained tokens of each row, whether the reward was stated) each."""
    made = tuple(
        Rollout(tuple(map(row, trained)), [], {"w": reward}, row_offsets=np.array(offsets), has_reference=stated)
        for reward, offsets, trained, stated in rollouts
    )
    return Group(7, Prompt(0, 0, [], {}), made, 0)


def test_rows_keep_their_rewards_and_get_the_shift_and_scale_of_their_rollout():
    group = rows_group((1.0, [-0.19, -0.1, 0], [3, 3, 3], True), (0.0, [0, 0], [3, 3], False))
    grouped = Grouped(eps=1e-5)
    scores = grouped.scores(group, 100)
    np.testing.assert_allclose(scores.rows, [0.81, 0.9, 1, 0, 0])
    assert scores.references.tolist() == [1, 0] and scores.row_counts.tolist() == [3, 2]
    np.testing.assert_allclose(grouped.of_rows(scores), [0.61999, 0.79998, 0.99998, -0.99998, -0.99998], atol=1e-5)
    np.testing.assert_allclose(grouped.of(scores), [0.99998, -0.99998], atol=1e-5)
    shaped = Grouped(reward_bias=1, reward_scaling=2, reward_clip=3).scores(group, 100)
    np.testing.assert_allclose(shaped.rows, [3, 3, 3, 2, 2])
    np.testing.assert_allclose(shaped.references, [3, 2])


def test_the_length_penalty_leaves_an_explicit_reference_alone():
    zone = Overlong(enabled=True, tokens=4)
    stated = rows_group((1.0, [0, 0], [2, 4], True), (0.0, [0], [1], False))
    scores = Grouped(overlong=zone).scores(stated, 5)
    # Zone of 4 before 5: 2 trained tokens lose 0.25, 4 lose 0.75, 1 loses nothing.
    assert scores.rows.tolist() == [0.75, 0.25, 0.0] and scores.references.tolist() == [1.0, 0.0]
    with pytest.raises(ContractError, match=r"2 rows of usable rollout 0 .*\(0.75, 0.25\); supply an explicit rollout_reward"):
        Grouped(overlong=zone).scores(rows_group((1.0, [0, 0], [2, 4], False), (0.0, [0], [1], False)), 5)


def sample(group_id, slot, reward, trained=2):
    none = np.zeros((trained, 0), np.int32)
    mask = np.array([False] + [True] * trained)
    return Sample(
        np.zeros(trained + 1, np.int32), mask, np.zeros(trained + 1, np.float32), np.zeros(trained + 1, np.int32), 0.0,
        none, none.astype(np.float32), None, group_id, slot, reward,
    )  # fmt: skip


def ready(group_id, references, slots=None):
    references = np.array(references, np.float64)
    slots = np.arange(len(references), dtype=np.int32) if slots is None else np.array(slots, np.int32)
    return ReadyGroup(group_id, 0, 0, (), references, {}, slots, 0, 0.0, references)


def test_batch_levels_are_over_the_rollouts_of_the_step():
    groups = {3: ready(3, [1, 1]), 4: ready(4, [5, 5, 9], slots=[0, 2, 3])}
    # Rollout 4.0 has two rows; rollout 4.3 (reward 9) has no sample in this step.
    samples = [sample(4, 0, 5.0), sample(3, 1, 1.0), sample(4, 0, 4.0), sample(3, 0, 1.0), sample(4, 2, 5.0)]
    found = Grouped(mean_level="batch", std_level=None).of_step(samples, groups.__getitem__)
    np.testing.assert_allclose(found, [2, -2, 1, -2, 2])  # around (1 + 1 + 5 + 5) / 4 = 3
    found = Grouped(mean_level="batch", std_level="batch", eps=0).of_step(samples, groups.__getitem__)
    np.testing.assert_allclose(found, [1, -1, 0.5, -1, 1])
    # A group's own statistics are over all of its rollouts: deviations 2, 2 and 6 from 3 in group 4, 2 and 2 in group 3.
    found = Grouped(mean_level="batch", std_level="group", eps=0).of_step(samples, groups.__getitem__)
    wide = np.sqrt((4 + 4 + 36) / 3)
    np.testing.assert_allclose(found, [2 / wide, -1, 1 / wide, -1, 2 / wide])
    found = Grouped(mean_level="group", std_level="batch", eps=0).of_step(samples, groups.__getitem__)
    mean = 19 / 3
    std = np.sqrt(2 * (5 - mean) ** 2 / 4)  # both rollouts of group 3 deviate by 0
    np.testing.assert_allclose(found, [(5 - mean) / std, 0, (4 - mean) / std, 0, (5 - mean) / std])


def test_a_step_of_whole_groups_equals_the_table():
    values = np.array([1.0, 0.0, 3.0, 7.0, 2.0])
    groups = {0: ready(0, values[:2]), 1: ready(1, values[2:])}
    samples = [sample(0, i, v) for i, v in enumerate(values[:2])] + [sample(1, i, v) for i, v in enumerate(values[2:])]
    for settings in (dict(leave_one_out=True), dict(std_unbiased=True), {}):
        found = Grouped(mean_level="batch", std_level="batch", **settings).of_step(samples, groups.__getitem__)
        plain = {"unbiased" if k == "std_unbiased" else k: v for k, v in settings.items()}
        np.testing.assert_allclose(found, normalise(values, mean_level="batch", std_level="batch", **plain))


def test_unscorable_rollouts_of_a_step_get_zero():
    groups = {0: ready(0, [1, NAN, 3])}
    samples = [sample(0, 0, 1.0), sample(0, 1, NAN), sample(0, 2, 3.0)]
    found = Grouped(mean_level="batch", std_level="batch", eps=0).of_step(samples, groups.__getitem__)
    assert found.tolist() == [-1, 0, 1]


def test_advantages_over_trained_tokens():
    found = over_tokens(np.array([1.0, 4.0]), np.array([2, 1]), [np.arange(2)], eps=0)
    np.testing.assert_allclose(found, [-0.70711, 1.41421], atol=1e-5)  # tokens 1 1 4: mean 2, std sqrt 2
    alone = over_tokens(np.array([1.0, 4.0]), np.array([2, 1]), [np.arange(2)], eps=0, leave_one_out=True)
    base = np.array([2.5, 2.5, 1.0])
    np.testing.assert_allclose(alone, (np.array([1, 4]) - base[1:]) / np.sqrt(((np.array([1, 1, 4]) - base) ** 2).mean()))
    samples = [sample(0, 0, 1.0, 2), sample(0, 1, 4.0, 1), sample(1, 0, NAN, 3)]
    grouped = Grouped(token_norm="group", eps=0)
    np.testing.assert_allclose(grouped.of_tokens(samples, np.array([1.0, 4.0, 0.0])), [-0.70711, 1.41421, 0], atol=1e-5)
    assert Grouped(token_norm="batch").needs_step and not Grouped(token_norm="group").needs_step
    assert Grouped(std_level="batch").needs_step and not Grouped().needs_step


def test_rollout_time_normalisation_drops_a_group_that_lacks_a_reward():
    at_once = Grouped(mean_level=None, std_level=None, rollout_time_norm=True)
    assert at_once.drop_reason(np.array([1.0, 0.0, NAN])) == "under_scored"
    assert Grouped().drop_reason(np.array([1.0, 0.0, NAN])) is None


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

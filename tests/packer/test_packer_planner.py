"""Placement, budgets, steps, and what happens to samples that wait in the planner (PACK-12 to PACK-22)."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packer_samples import attention_cost, identity, make_sample, sample_lists, unique_positions

from agrpo.errors import ContractError
from agrpo.packer.cost import Cost
from agrpo.packer.sequence import Sequence
from agrpo.packer.tree import Tree

COST = Cost(linear=0)


def fresh(length, group_id, rollout_index=0, trained=1):
    """A sample that shares nothing with samples of other (group, slot)."""
    base = 10_000 * (group_id + 1) + 1_000 * rollout_index
    return make_sample(range(base, base + length), trained, group_id=group_id, rollout_index=rollout_index)


def feed(planner, samples):
    steps = [step for s in samples if (step := planner.add(s)) is not None]
    while (step := planner.flush()) is not None:
        steps.append(step)
    return steps


def assignment(steps):
    """steps -> microbatches -> rows -> (group, slot)."""
    return [[[identity(row) for row in m.rows] for m in step.microbatches] for step in steps]


def test_a_new_group_goes_to_the_least_loaded_row():  # PACK-17
    samples = [fresh(5, 0), fresh(7, 1), fresh(3, 2), fresh(2, 3)]
    steps = feed(Tree().planner(3, 100, COST, 1), samples)
    # loads 15, 28, 6: the fourth joins the third row.
    assert assignment(steps) == [[[[(0, 0)], [(1, 0)], [(2, 0), (3, 0)]]]]


def test_a_new_group_goes_to_the_least_loaded_row_that_fits():  # PACK-17
    # Row 0 holds 9 of 10 tokens in three samples, load 18; row 1 holds 7 in one, load 28: it alone has room for two
    # more, and the last sample has room nowhere.
    samples = [fresh(3, 0), fresh(7, 1), fresh(3, 2), fresh(3, 3), fresh(2, 4), fresh(2, 5)]
    steps = feed(Tree().planner(2, 10, COST, 1), samples)
    assert assignment(steps) == [[[[(0, 0), (2, 0), (3, 0)], [(1, 0), (4, 0)]]]]


def test_when_nothing_fits_the_microbatch_closes_and_the_sample_opens_the_next():  # PACK-17
    planner = Tree().planner(2, 10, COST, 1)
    assert [planner.add(s) for s in (fresh(8, 0), fresh(8, 1))] == [None, None]
    step = planner.add(fresh(4, 2))
    assert assignment([step]) == [[[[(0, 0)], [(1, 0)]]]] and step.index == 1
    assert identity(planner.pending()) == [(2, 0)]
    assert planner.flush() is None  # its second row is empty


def test_siblings_go_home_even_when_another_row_is_empty():  # PACK-15
    planner = Tree().planner(3, 100, COST, 1)
    for slot in range(4):
        planner.add(make_sample([1, 2, 3, 40 + slot], 1, rollout_index=slot))
    planner.add(fresh(1, 5, trained=0))
    planner.add(fresh(1, 6, trained=0))
    rows = planner.flush().microbatches[0].rows
    assert [len(r.sample_tokens) for r in rows] == [4, 1, 1] and rows[0].num_tokens == 2 + 4 * 2


def test_of_two_homes_the_least_loaded_is_taken():  # PACK-15
    # Group 0 fills row 0, goes on in row 1 (empty), whose load is then lower.
    samples = [fresh(9, 0, 0), fresh(6, 0, 1), fresh(1, 0, 2, trained=0)]
    steps = feed(Tree().planner(2, 10, COST, 1), samples)
    assert assignment(steps) == [[[[(0, 0)], [(0, 1), (0, 2)]]]]


def test_a_full_home_gives_way_to_an_empty_row():  # PACK-16, first case
    steps = feed(Tree().planner(2, 10, COST, 1), [fresh(3, 0, 0), fresh(9, 0, 1)])
    # The second makes the heaviest row (45 > 6), which an empty row allows.
    assert assignment(steps) == [[[[(0, 0)], [(0, 1)]]]]


def test_a_full_home_gives_way_to_a_row_that_stays_below_the_heaviest():  # PACK-16, second case
    samples = [fresh(9, 0, 0), fresh(3, 1), fresh(5, 0, 1)]
    # Row 1 would have 6 + 15 = 21 <= 45.
    assert assignment(feed(Tree().planner(2, 10, COST, 1), samples)) == [[[[(0, 0)], [(1, 0), (0, 1)]]]]


@pytest.mark.parametrize(
    ("length", "linear", "attention", "closes"), [(5, 0, 1, False), (6, 0, 1, True), (5, 1, 0, False)]
)
def test_a_placement_may_equal_the_heaviest_row_but_not_exceed_it(length, linear, attention, closes):  # PACK-16
    planner = Tree().planner(2, 8, Cost(linear, attention), 1)
    for sample in (fresh(6, 0, 0), fresh(1, 1, 0, trained=0)):
        assert planner.add(sample) is None
    # Its home has 6 of 8 tokens. By attention the heaviest row is 21: the other becomes 1 + 15 or 1 + 21; by tokens
    # it is 6, and the other becomes 1 + 5.
    step = planner.add(fresh(length, 0, 1))
    assert (step is not None) == closes
    assert identity(planner.pending()) == ([(0, 1)] if closes else [(0, 0), (1, 0), (0, 1)])


def test_terms_are_limited_by_the_budget_too():  # PACK-12
    same = [make_sample([1, 2, 3, 4], 3, rollout_index=slot) for slot in range(4)]
    planner = Tree().planner(1, 10, COST, 1)
    assert [planner.add(s) for s in same[:3]] == [None] * 3  # 4 unique tokens, 9 terms
    step = planner.add(same[3])
    row = step.microbatches[0].rows[0]
    assert (row.num_tokens, row.num_trained_tokens) == (4, 9)


def test_a_sample_longer_than_the_budget_is_dropped_and_told(caplog):  # PACK-14
    planner = Tree().planner(1, 7, COST, 1)
    with caplog.at_level(logging.WARNING):
        assert planner.add(fresh(8, 3, 2)) is None
    assert planner.add(fresh(7, 4)) is None
    assert identity(planner.dropped_oversize) == [(3, 2)] and identity(planner.pending()) == [(4, 0)]
    assert "8 tokens" in caplog.text and "packer.token_budget 7" in caplog.text


@pytest.mark.parametrize("sample", [make_sample([1, 2], mask=[1, 1], group_id=3), make_sample([], mask=[], group_id=3)])
def test_a_first_token_that_nothing_predicts_cannot_be_trained(sample):
    with pytest.raises(ContractError, match="group 3, rollout 0"):
        Tree().planner(1, 7, COST, 1).add(sample)


def test_a_step_has_all_its_microbatches():  # PACK-20
    planner = Tree().planner(2, 10, COST, 3)
    planner.next_index = 11
    steps = feed(planner, [fresh(8, g, trained=3) for g in range(17)])
    assert [s.index for s in steps] == [11, 12]
    assert [[len(m.rows) for m in s.microbatches] for s in steps] == [[2, 2, 2], [2, 2, 2]]
    assert [s.num_trained_tokens for s in steps] == [18, 18]
    assert identity(planner.pending()) == [(g, 0) for g in range(12, 17)]


def test_loads_count_linear_cost_per_unique_token():  # PACK-19
    samples = [make_sample([1, 2, 3, 4], 1), make_sample([1, 2, 5], 1, rollout_index=1)]
    planner = Tree(linear_cost=100.0).planner(1, 50, Cost(linear=7), 1)
    row = feed(planner, samples)[0].microbatches[0].rows[0]
    assert row.load == 6 * 100 + (1 + 2 + 3 + 4) + (2 + 3)


def test_the_components_settings_come_first():
    planner = Sequence(token_budget=13, linear_cost=3.5).planner(1, 50, Cost(linear=7), 1)
    assert (planner.token_budget, planner.cost) == (13, Cost(linear=3.5))
    planner = Sequence().planner(1, 50, Cost(linear=7), 1)
    assert (planner.token_budget, planner.cost) == (50, Cost(linear=7))


@pytest.mark.parametrize("sizes", [(0, 5, 1), (1, 0, 1), (1, 5, 0)])
def test_sizes_below_one_are_refused(sizes):
    rows, budget, microbatches = sizes
    with pytest.raises(ValueError, match=">= 1, got 0"):
        Tree().planner(rows, budget, COST, microbatches)


class ReferencePlanner:
    """PACK-12 to PACK-18 over plain lists of samples; sizes recomputed from sets of prefixes every time."""

    def __init__(self, num_rows, budget, linear):
        self.num_rows, self.budget, self.linear, self.closed = num_rows, budget, linear, []
        self.rows = [[] for _ in range(num_rows)]

    def load(self, row):
        return self.linear * len(unique_positions(row)) + attention_cost(row)

    def has_room(self, row, sample):
        terms = sum(s.num_trained_tokens for s in [*row, sample])
        return len(unique_positions([*row, sample])) <= self.budget and terms <= self.budget

    def add(self, sample):
        if len(sample.token_ids) > self.budget:
            return
        homes = [r for r in self.rows if any(s.group_id == sample.group_id for s in r)]
        others = [r for r in self.rows if all(r is not h for h in homes)]
        if homes and any(self.has_room(r, sample) for r in homes):
            candidates = homes
        elif homes and all(self.rows):
            heaviest = max(self.load(r) for r in self.rows)
            candidates = [r for r in others if self.load([*r, sample]) <= heaviest]
        else:
            candidates = others
        candidates = [r for r in candidates if self.has_room(r, sample)]
        if not candidates:
            self.closed.append(self.rows)
            self.rows = [[] for _ in range(self.num_rows)]
            candidates = self.rows
        min(candidates, key=self.load).append(sample)


shapes = st.tuples(st.integers(1, 3), st.sampled_from([9, 14, 23, 40]), st.integers(1, 2), st.sampled_from([0, 3, 50]))


@settings(deadline=None)
@given(sample_lists(max_samples=37), shapes)
def test_placement_follows_the_rules(samples, shape):
    num_rows, budget, microbatches, linear = shape
    reference = ReferencePlanner(num_rows, budget, linear)
    for sample in samples:
        reference.add(sample)
    if all(reference.rows):
        reference.closed.append(reference.rows)
    expected = [[identity(row) for row in rows] for rows in reference.closed]
    steps = feed(Tree().planner(num_rows, budget, Cost(linear=linear), microbatches), samples)
    found = [rows for step in assignment(steps) for rows in step]
    assert found == expected[: len(expected) // microbatches * microbatches]


@settings(deadline=None)
@given(sample_lists(max_samples=37), shapes, st.sampled_from([Tree(), Sequence()]))
def test_what_every_plan_keeps(samples, shape, packer):
    num_rows, budget, microbatches, linear = shape
    planner = packer.planner(num_rows, budget, Cost(linear=linear), microbatches)
    steps = feed(planner, samples)
    rows = [row for step in steps for m in step.microbatches for row in m.rows]
    assert all(row.num_tokens <= budget and row.num_trained_tokens <= budget and len(row.sample_tokens) for row in rows)
    assert all(len(m.rows) == num_rows for step in steps for m in step.microbatches)  # ARCH-15
    assert [step.index for step in steps] == list(range(1, len(steps) + 1))
    accounted = [x for row in rows for x in identity(row)]
    accounted += identity(planner.pending()) + identity(planner.dropped_oversize)
    assert sorted(accounted) == sorted(identity(samples))  # none lost, none twice


@settings(deadline=None)
@given(sample_lists(max_samples=37), shapes)
def test_the_same_samples_give_the_same_rows(samples, shape):  # PACK-22
    num_rows, budget, microbatches, linear = shape
    first, second = (
        feed(Tree().planner(num_rows, budget, Cost(linear=linear), microbatches), samples) for _ in range(2)
    )
    assert assignment(first) == assignment(second)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.microbatches, b.microbatches, strict=True):
            assert all(np.array_equal(r.token_ids, s.token_ids) for r, s in zip(x.rows, y.rows, strict=True))


@settings(deadline=None)
@given(sample_lists(max_samples=37), shapes, st.integers(0, 36))
def test_a_planner_restored_from_its_pending_samples_goes_on_alike(samples, shape, cut):
    num_rows, budget, microbatches, linear = shape
    planner = Tree().planner(num_rows, budget, Cost(linear=linear), microbatches)
    for sample in samples[:cut]:
        planner.add(sample)
    restored = Tree().planner(num_rows, budget, Cost(linear=linear), microbatches)
    restored.next_index = planner.next_index
    restored.rebuild(planner.pending())
    assert restored.ready() is None
    rest, again = feed(planner, samples[cut:]), feed(restored, samples[cut:])
    assert assignment(rest) == assignment(again) and [s.index for s in rest] == [s.index for s in again]


@settings(deadline=None)
@given(sample_lists(max_samples=37), shapes, st.integers(0, 4))
def test_dropped_samples_leave_and_the_others_are_planned_as_if_they_had_never_come(samples, shape, group_id):
    num_rows, budget, microbatches, linear = shape
    planner = Tree().planner(num_rows, budget, Cost(linear=linear), microbatches)
    for sample in samples:
        planner.add(sample)
    before = planner.pending()
    dropped = planner.drop(lambda s: s.group_id == group_id)
    kept = [s for s in before if s.group_id != group_id]
    assert identity(dropped) == [x for x in identity(before) if x[0] == group_id]
    assert identity(planner.pending()) == identity(kept)
    other = Tree().planner(num_rows, budget, Cost(linear=linear), microbatches)
    other.next_index = planner.next_index
    assert assignment(feed(planner, [])) == assignment(feed(other, kept))


def test_pending_samples_replanned_for_fewer_rows_may_hold_several_steps():
    planner = Tree().planner(4, 10, COST, 1)
    for group_id in range(4):
        planner.add(fresh(8, group_id))
    smaller = Tree().planner(1, 10, COST, 1)
    smaller.rebuild(planner.pending())
    steps = []
    while (step := smaller.ready()) is not None:
        steps.append(step)
    assert [s.index for s in steps] == [1, 2, 3] and identity(smaller.pending()) == [(3, 0)]


def test_statistics_are_the_steps_sums():
    samples = [make_sample([1, 2, 3, 4, 5], 2), make_sample([1, 2, 3, 6, 7], 2, rollout_index=1), fresh(3, 7)]
    planner = Tree().planner(2, 11, COST, 1)
    figures = planner.statistics(feed(planner, samples)[0])
    assert figures == {
        "batch/forwarded_tokens_per_step": (11, 1),
        "batch/trained_tokens_per_step": (5, 1),
        "batch/samples_per_step": (3, 1),
        "batch/groups_per_step": (2, 1),
        "batch/microbatches_per_step": (1, 1),
        "batch/masked_token_frac": (8, 13),
        "batch/samples_per_row": (3, 2),
        "batch/row_tokens_mean": (11, 2),
        "batch/row_tokens_max": (8, 1),
        "batch/row_fill_frac": (11, 22),
        "batch/row_imbalance": (27 / ((27 + 6) / 2), 1),
        "batch/packing_ratio": (13, 11),
        "batch/pad_frac": (0, 11),
    }


@settings(deadline=None)
@given(sample_lists())
def test_without_sharing_the_packing_ratio_is_one(samples):  # PACK-8
    planner = Sequence().planner(1, 1_000, COST, 1)
    raw, unique = planner.statistics(feed(planner, samples)[0])["batch/packing_ratio"]
    assert raw == unique == sum(len(s.token_ids) for s in samples)

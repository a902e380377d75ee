"""One row: what is shared, how it is laid out, and that every loss term is the sample's own (PACK-1 to PACK-8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from packer_samples import attention_cost, make_sample, paths, sample_lists, unique_positions

from agrpo.packer.cost import Cost
from agrpo.packer.sequence import Sequence
from agrpo.packer.tree import Tree

BUDGET = 10_000


def pack(samples, packer=None, cost=Cost(linear=0)):
    """All samples in one row."""
    planner = (packer or Tree()).planner(1, BUDGET, cost, 1)
    assert [planner.add(s) for s in samples] == [None] * len(samples)
    return planner.flush().microbatches[0].rows[0]


def segments(row):
    return list(zip(row.segment_starts.tolist(), row.segment_ends.tolist(), row.segment_parents.tolist(), strict=True))


def test_the_worked_example():
    # PACK-2 and PACK-3: p1 p2 p3 = 1 2 3, a1 a2 = 4 5, b1 b2 = 6 7.
    row = pack([make_sample([1, 2, 3, 4, 5], 2), make_sample([1, 2, 3, 6, 7], 2, rollout_index=1)])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 3, 6, 7]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert segments(row) == [(0, 2, -1), (2, 5, 0), (5, 8, 0)]
    assert paths(row) == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 5, 6, 7]]
    assert row.predicting_index.tolist() == [2, 3, 5, 6]
    assert row.target_ids.tolist() == [4, 5, 6, 7]
    assert row.sample_index.tolist() == [0, 0, 1, 1]
    assert row.advantages.tolist() == [-7.5, -7.5, -6.5, -6.5]
    assert row.load == 1 + 2 + 3 + 4 + 5 + 3 + 4 + 5


def test_identical_samples_share_the_path_and_keep_their_terms():
    first = make_sample([5, 6, 7, 8], 2, num_head=3)
    second = make_sample([5, 6, 7, 8], 2, rollout_index=1, num_head=3)
    row = pack([first, second])
    assert row.token_ids.tolist() == [5, 6, 7, 8] and segments(row) == [(0, 4, -1)]
    assert row.predicting_index.tolist() == [1, 2, 1, 2] and row.target_ids.tolist() == [7, 8, 7, 8]
    assert row.advantages.tolist() == [-7.5, -7.5, -6.5, -6.5]
    assert np.array_equal(
        row.sampler_logprobs, np.concatenate([first.sampler_logprobs[2:], second.sampler_logprobs[2:]])
    )
    assert np.array_equal(row.head_ids, np.concatenate([first.head_ids, second.head_ids]))


@pytest.mark.parametrize("order", [1, -1])
def test_a_sample_that_is_the_prefix_of_another_keeps_its_own_last_token(order):
    short, long = make_sample([1, 2, 3], 1), make_sample([1, 2, 3, 4, 5], 2, rollout_index=1)
    row = pack([short, long][::order])
    assert row.num_tokens == 6  # 1 2 shared, 3 twice, 4, 5
    assert segments(row)[0] == (0, 2, -1) and row.token_ids[:2].tolist() == [1, 2]
    tails = [tuple(row.token_ids[s:e].tolist()) for s, e, _ in segments(row)[1:]]
    assert tails == ([(3,), (3, 4, 5)] if order == 1 else [(3, 4, 5), (3,)])


def test_a_later_fork_splits_a_segment():
    row = pack([make_sample([1, 2, 3, 4, 5]), make_sample([1, 2, 3, 4, 6]), make_sample([1, 2, 7])])
    assert segments(row) == [(0, 1, -1), (1, 3, 0), (3, 5, 1), (5, 7, 1), (7, 9, 0)]
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 4, 6, 2, 7]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 1, 2]


def test_one_equal_token_alone_is_not_shared():
    row = pack([make_sample([1, 2]), make_sample([1, 3])])
    assert segments(row) == [(0, 2, -1), (2, 4, -1)]


def test_a_system_prompt_is_shared_over_groups():
    system = list(range(100, 117))
    row = pack([make_sample([*system, g, 50 + r], 1, group_id=g, rollout_index=r) for g in range(3) for r in range(2)])
    # 16 of the 17 shared by all; then per group the 17th and, per rollout, its prompt token and its answer.
    assert row.num_tokens == 16 + 3 * 1 + 6 * 2
    assert row.segment_parents.tolist() == [-1, 0, 1, 1, 0, 4, 4, 0, 7, 7]


def test_a_single_token_that_is_not_trained():
    row = pack([make_sample([9]), make_sample([9]), make_sample([9, 8])])
    assert segments(row) == [(0, 1, -1), (1, 3, -1)] and row.target_ids.tolist() == [8]


def test_untrained_tokens_between_turns_have_no_terms():
    sample = make_sample([1, 2, 3, 4, 5, 6, 7], mask=[0, 0, 1, 1, 0, 0, 1], candidates=True, num_head=2)
    row = pack([sample, make_sample([1, 2, 3, 9], mask=[0, 0, 1, 0], rollout_index=1, candidates=True, num_head=2)])
    # 1 is shared; 2 predicts 3 in both, 3 predicts 4 or 9: [1 2 | 3 4 5 6 7 | 3 9].
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 3, 9]
    assert row.predicting_index.tolist() == [1, 2, 5, 1] and row.target_ids.tolist() == [3, 4, 7, 3]
    assert [row.candidates[i].tolist() for i in range(4)] == [[0, 1], [0, 1, 2], [0, 1], [1, 2]]


def test_candidate_sets_for_some_samples_only_are_an_error():
    with pytest.raises(ValueError, match="candidate sets"):
        pack([make_sample([1, 2]), make_sample([1, 3], candidates=True)])


def check_row(row, samples):
    """Every sample is a path of the row, and its terms are its own, read at the predecessor on that path."""
    assert np.array_equal(row.segment_ends[:-1], row.segment_starts[1:]) and row.segment_starts[0] == 0
    assert row.segment_ends[-1] == row.num_tokens and (row.segment_ends > row.segment_starts).all()
    by_tokens = {}
    for path in paths(row):
        assert row.position_ids[path].tolist() == list(range(len(path)))
        by_tokens.setdefault(tuple(row.token_ids[path].tolist()), []).append(path)
    start = 0
    for index, sample in enumerate(samples):
        trained, tokens = np.flatnonzero(sample.loss_mask), tuple(sample.token_ids.tolist())
        terms = slice(start, start + len(trained))
        start += len(trained)
        fitting = [p for p in by_tokens[tokens] if row.predicting_index[terms].tolist() == [p[t - 1] for t in trained]]
        assert fitting, (index, tokens)
        assert np.array_equal(row.target_ids[terms], sample.token_ids[trained])
        assert np.array_equal(row.sampler_logprobs[terms], sample.sampler_logprobs[trained])
        assert np.array_equal(row.versions[terms], sample.versions[trained])
        assert (row.advantages[terms] == np.float32(sample.advantage)).all() and (
            row.sample_index[terms] == index
        ).all()
        assert np.array_equal(row.head_ids[terms], sample.head_ids)
        assert np.array_equal(row.head_logprobs[terms], sample.head_logprobs)
        if sample.candidates is not None:
            expected = [sample.candidates[i].tolist() for i in range(len(trained))]
            assert [row.candidates[i].tolist() for i in range(terms.start, terms.stop)] == expected
    assert start == row.num_trained_tokens
    assert row.group_ids.tolist() == [s.group_id for s in samples]
    assert row.rollout_indices.tolist() == [s.rollout_index for s in samples]
    assert row.sample_tokens.tolist() == [len(s.token_ids) for s in samples]


def check_depth_first(row):
    """Each segment's parent is the previous segment or an ancestor of it; nothing but branches and ends cut a path."""
    ancestors: list[int] = []
    for index, parent in enumerate(row.segment_parents.tolist()):
        while ancestors and ancestors[-1] != parent:
            ancestors.pop()
        assert parent == (ancestors[-1] if ancestors else -1)
        ancestors.append(index)
    children = np.bincount(row.segment_parents[row.segment_parents >= 0], minlength=len(row.segment_parents))
    assert not (children == 1).any()


@settings(deadline=None)
@given(sample_lists(num_head=3, candidates=True))
def test_a_tree_row_holds_each_unique_position_once(samples):
    row = pack(samples)
    assert row.num_tokens == len(unique_positions(samples))
    assert row.load == attention_cost(samples)
    check_depth_first(row)
    check_row(row, samples)


@settings(deadline=None)
@given(sample_lists(num_head=3, candidates=True))
def test_each_packed_position_predicts_one_token(samples):
    row = pack(samples)
    targets = {}
    for index, target in zip(row.predicting_index.tolist(), row.target_ids.tolist(), strict=True):
        assert targets.setdefault(index, target) == target


@settings(deadline=None)
@given(sample_lists(num_head=3, candidates=True))
def test_a_sequence_row_shares_nothing(samples):
    row = pack(samples, Sequence())
    lengths = [len(s.token_ids) for s in samples]
    assert row.token_ids.tolist() == [t for s in samples for t in s.token_ids.tolist()]
    assert row.segment_ends.tolist() == np.cumsum(lengths).tolist() and (row.segment_parents == -1).all()
    assert row.load == sum(n * (n + 1) // 2 for n in lengths)
    check_row(row, samples)


@settings(deadline=None)
@given(sample_lists())
def test_both_packers_train_the_same_terms(samples):
    tree, sequence = pack(samples), pack(samples, Sequence())
    for name in ("target_ids", "sampler_logprobs", "advantages", "versions", "sample_index", "group_ids"):
        assert np.array_equal(getattr(tree, name), getattr(sequence, name)), name


def test_long_random_siblings_against_prefix_lengths():
    # 7 answers that copy the first up to a random length: what is shared follows from the copied lengths.
    rng = np.random.default_rng(5)
    first = rng.integers(10, 50_000, 1009, dtype=np.int32)
    samples, expected = [make_sample(first, 701)], len(first)
    for slot, cut in enumerate(sorted(rng.integers(1, 1009, 6).tolist()), start=1):
        tail = rng.integers(50_000, 90_000, 307, dtype=np.int32)
        samples.append(make_sample(np.concatenate([first[:cut], tail]), 307, rollout_index=slot))
        expected += 307 + 1  # the last copied token is forwarded again: it predicts another token
    row = pack(samples)
    assert row.num_tokens == expected
    check_row(row, samples)

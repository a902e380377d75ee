"""Turns -> samples: by hand, and over random histories that extend, rewrite and forget (TURN-2 to TURN-9)."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.env.stitch import chains, drift_tokens, forwarded_tokens, stitch
from agrpo.types import Ragged, Rollout, Turn

HEADS = 2


def make_turn(prompt, output, mask=None, version=1, first=0, candidates=False):
    """A turn whose log-probs, versions and heads all tell which generated token (numbered from `first`) they belong to."""
    n = len(output)
    number = np.arange(first, first + n)
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        sampler_logprobs=-1.0 - number.astype(np.float32),
        output_mask=np.ones(n, bool) if mask is None else np.array(mask, bool),
        versions=np.full(n, version, np.int32),
        head_ids=np.stack([number, number + 1000], 1).astype(np.int32),
        head_logprobs=np.stack([-1.0 - number, -2.0 - number], 1).astype(np.float32),
        candidates=Ragged.of([[int(i)] * (1 + int(i) % 3) for i in number]) if candidates else None,
        finish_reason="stop",
    )


def test_a_turn_that_extends_the_last_is_the_same_sample():
    turns = (make_turn([1, 2], [3, 4], version=5), make_turn([1, 2, 3, 4, 9], [6], version=6, first=2))
    (sample,) = stitch(Rollout(turns, []), 0.5, 11, 3)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.sampler_logprobs.tolist() == [0, 0, -1, -2, 0, -3]
    assert sample.versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert sample.head_ids.tolist() == [[0, 1000], [1, 1001], [2, 1002]]
    assert (sample.advantage, sample.group_id, sample.rollout_index) == (0.5, 11, 3)
    assert sample.oldest_version == 5 and sample.num_trained_tokens == 3


def test_a_turn_with_another_history_is_a_fork():
    turns = (make_turn([1, 2], [3]), make_turn([1, 7, 3], [4, 5], first=1), make_turn([1, 7, 3, 4, 5, 8], [6], first=3))
    first, second = stitch(Rollout(turns, []), -1.0, 0, 0)
    assert first.token_ids.tolist() == [1, 2, 3]
    assert second.token_ids.tolist() == [1, 7, 3, 4, 5, 8, 6]
    assert second.loss_mask.tolist() == [False] * 3 + [True, True, False, True]
    assert second.sampler_logprobs[second.loss_mask].tolist() == [-2, -3, -4]
    assert forwarded_tokens(Rollout(turns, [])) == 3 + 7
    assert drift_tokens(turns) == [2, 0]


def test_a_prompt_that_drops_the_end_of_an_answer_is_a_fork():
    turns = (make_turn([1], [2, 3]), make_turn([1, 2], [4], first=2))
    assert [s.token_ids.tolist() for s in stitch(Rollout(turns, []), 1.0, 0, 0)] == [[1, 2, 3], [1, 2, 4]]
    assert drift_tokens(turns) == [1]


def test_masked_tokens_are_context_and_a_sample_without_trained_tokens_is_left_out():
    turns = (
        make_turn([1], [2, 3], mask=[False, True], candidates=True),
        make_turn([9], [4], mask=[False], first=2, candidates=True),
    )
    (sample,) = stitch(Rollout(turns, []), 1.0, 0, 0)
    assert sample.token_ids.tolist() == [1, 2, 3] and sample.loss_mask.tolist() == [False, False, True]
    assert sample.head_ids.tolist() == [[1, 1001]] and [c.tolist() for c in sample.candidates] == [[1, 1]]
    assert sample.sampler_logprobs.tolist() == [0, 0, -2] and sample.versions.tolist() == [-1, -1, 1]
    assert forwarded_tokens(Rollout(turns, [])) == 3


@st.composite
def histories(draw):
    """Random turns: each prompt extends what is held, rewrites one token of it, cuts it, or starts over."""
    turns, held, first = [], draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)), 0
    for _ in range(draw(st.integers(1, 7))):
        output = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        mask = draw(st.lists(st.booleans(), min_size=len(output), max_size=len(output)))
        turns.append(make_turn(held, output, mask, first=first, version=first, candidates=True))
        first += len(output)
        held = held + output
        match draw(st.sampled_from(["extend", "extend", "rewrite", "cut", "restart"])):
            case "rewrite":
                at = draw(st.integers(0, len(held) - 1))
                held = [*held[:at], (held[at] + 1) % 4, *held[at + 1 :]]
            case "cut":
                held = held[: draw(st.integers(1, len(held)))]
            case "restart":
                held = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        held = held + draw(st.lists(st.integers(0, 3), max_size=3))
    return tuple(turns)


@settings(max_examples=100, deadline=None)
@given(histories())
def test_every_generated_token_is_trained_exactly_once_and_nothing_else_is(turns):
    samples = stitch(Rollout(turns, []), 1.5, 0, 0)
    trained = [int(-1 - p) for s in samples for p in s.sampler_logprobs[s.loss_mask]]
    wanted = [i for t in turns for i, m in zip((-1 - t.sampler_logprobs).astype(int), t.output_mask, strict=True) if m]
    assert trained == wanted
    assert [int(h) for s in samples for h in s.head_ids[:, 0]] == wanted
    assert [c.tolist() for s in samples for c in s.candidates] == [[i] * (1 + i % 3) for i in wanted]
    ids = {int(-1 - p): int(i) for t in turns for i, p in zip(t.output_ids, t.sampler_logprobs, strict=True)}
    assert [int(i) for s in samples for i in s.token_ids[s.loss_mask]] == [ids[i] for i in wanted]
    assert sum(len(s.token_ids) for s in samples) == forwarded_tokens(Rollout(turns, []))
    for sample in samples:
        assert not sample.sampler_logprobs[~sample.loss_mask].any()
        assert (sample.versions[~sample.loss_mask] == -1).all()
    # Every chain's tokens are a prefix-chain of its turns: the context the model saw is the context that is trained.
    for chain in chains(turns):
        whole = np.concatenate([chain[-1].prompt_ids, chain[-1].output_ids])
        for turn in chain:
            seen = np.concatenate([turn.prompt_ids, turn.output_ids])
            assert np.array_equal(whole[: len(seen)], seen)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=20))
def test_a_conversation_that_never_forks_is_one_sample(sizes):
    held, turns = [1, 2, 3], []
    for outputs, context in sizes:
        turns.append(make_turn(held, [5] * outputs))
        held = held + [5] * outputs + [6] * context
    assert len(stitch(Rollout(tuple(turns), []), 1.0, 0, 0)) == 1
    assert drift_tokens(turns) == [0] * (len(sizes) - 1)

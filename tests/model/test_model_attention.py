"""Tree attention against one dense ancestor mask, forward and backward, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_build import dense_attention, depth_first

from agrpo.errors import ConfigError
from agrpo.model.attention import tree_attention
from agrpo.model.plan import TreePlan


def _compare(tree, window, softcap, heads=4, kv_heads=2, dtype=torch.float64, tolerance=1e-10):
    torch.manual_seed(0)
    tokens = int(tree[1][-1])
    query = torch.randn(1, heads, tokens, 6, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, tokens, 6, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.randn(1, tokens, heads, 6, dtype=dtype)
    expected, depths = dense_attention(query, key, value, *tree, window, softcap)
    plan = TreePlan.of(*tree, depths)
    got, _ = tree_attention(None, query, key, value, None, sliding_window=window, softcap=softcap, tree_plan=plan)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    expected_grads = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    grads = torch.autograd.grad((got * weight).sum(), (query, key, value))
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference, atol=10 * tolerance, rtol=10 * tolerance)


@settings(max_examples=40, deadline=None)
@given(
    draws=st.lists(st.tuples(st.integers(1, 23), st.integers(0, 3)), min_size=1, max_size=11),
    window=st.none() | st.integers(1, 19),
    softcap=st.none() | st.just(1.5),
)
def test_random_trees_equal_the_dense_mask(draws, window, softcap):
    _compare(depth_first(draws), window, softcap)


@pytest.mark.parametrize("window", [None, 101, 331])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_long_segments_cross_the_chunks_exactly(window, softcap):
    draws = [(300, 0), (523, 0), (17, 1), (31, 1), (29, 1), (401, 3), (97, 0)]
    _compare(depth_first(draws), window, softcap, heads=2, kv_heads=1)


def test_bfloat16_stays_within_its_rounding():
    _compare(depth_first([(67, 0), (41, 0), (43, 1), (41, 1)]), None, None, dtype=torch.bfloat16, tolerance=3e-2)


def test_no_block_is_larger_than_the_tree_needs():
    """511 shared tokens and 8 answers of 124: the scores computed are those of one prompt, not of eight."""
    starts = np.array([0, *(511 + 124 * i for i in range(8))])
    ends, parents = np.append(starts[1:], 511 + 8 * 124), np.array([-1] + [0] * 8)
    blocks = TreePlan.of(starts, ends, parents, torch.zeros(1503, dtype=torch.long)).blocks(None)
    own = sum(
        b.index.shape[0] * b.index.shape[1] ** 2 if b.index is not None else (b.key.stop - b.key.start) ** 2
        for b in blocks.own
    )
    cross = sum((b.query.stop - b.query.start) * (b.key.stop - b.key.start) for b in blocks.cross)
    assert (own, cross, len(blocks.cross)) == (511**2 + 8 * 124**2, 8 * 124 * 511, 1)


def test_a_window_longer_than_every_path_needs_no_mask():
    plan = TreePlan.of(*depth_first([(5, 0), (7, 0), (3, 1)]), torch.tensor([*range(12), 5, 6, 7]))
    assert plan.blocks(12) is plan.blocks(None)
    assert any(b.kind == "band" for b in plan.blocks(3).own)


def test_a_forward_without_a_plan_and_attention_sinks_are_refused():
    states = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ConfigError, match="does not get the layout of a row"):
        tree_attention(None, states, states, states, None)
    plan = TreePlan.of(*depth_first([(3, 0)]), torch.arange(3))
    with pytest.raises(ConfigError, match="attention sinks"):
        tree_attention(None, states, states, states, None, tree_plan=plan, s_aux=torch.zeros(1))

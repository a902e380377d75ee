"""Each attention back end against one dense ancestor mask; the rule that chooses; what is refused."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_build import dense_attention, depth_first, group, make_model, make_row

from agrpo.errors import ConfigError
from agrpo.model import attention
from agrpo.model.backends.choice import MANY_COPIES, Case, choose
from agrpo.model.backends.flex import BLOCK, Flex, block_mask, visible
from agrpo.model.backends.gathered import Sdpa, _Gather
from agrpo.model.plan import TreePlan
from agrpo.model.terms import DeviceRow, token_terms

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TREES = st.lists(st.tuples(st.integers(1, 23), st.integers(0, 3)), min_size=1, max_size=11)
EXAMPLE = (np.array([0, 2, 5]), np.array([2, 5, 8]), np.array([-1, 0, 0]))  # p1 p2 | p3 a1 a2 | p3 b1 b2


def _inputs(tokens, heads=4, kv_heads=2, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, 6), (1, kv_heads, tokens, 6), (1, kv_heads, tokens, 6)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def test_the_paths_of_the_example_row():
    paths = TreePlan.of(*EXAMPLE, torch.tensor([0, 1, 2, 3, 4, 2, 3, 4])).paths
    assert paths.index.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    assert (paths.query_starts.tolist(), paths.key_starts.tolist()) == ([0, 2, 5, 8], [0, 2, 7, 12])
    assert (paths.query_starts.dtype, paths.longest_query, paths.longest_key) == (torch.int32, 3, 5)
    assert TreePlan.of(*EXAMPLE, torch.zeros(8)).copies == 12 / 8


@settings(max_examples=25, deadline=None)
@given(draws=TREES, window=st.none() | st.integers(1, 19))
def test_gathered_keys_equal_the_dense_mask(draws, window):
    tree = depth_first(draws)
    inputs = _inputs(int(tree[1][-1]))
    expected, depths = dense_attention(*inputs, *tree, window)
    got = Sdpa().attend(*inputs, TreePlan.of(*tree, depths), window, None, 6**-0.5)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    weight = torch.randn_like(got)
    for grad, reference in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(grad, reference, atol=1e-9, rtol=1e-9)


def test_gradients_of_many_copies_are_summed_in_float32():
    """1,000 ones: in bfloat16, 256 + 1 is 256."""
    key = torch.ones(1, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    _Gather.apply(key, torch.zeros(1000, dtype=torch.long)).sum().backward()
    assert key.grad.flatten().tolist() == [1000.0] * 3


@pytest.mark.parametrize("window", [None, 37, 150])
@pytest.mark.parametrize("draws", [[(130, 0), (223, 0), (57, 1), (61, 1)], [(256, 0)], [(41, 0), (60, 0), (3, 1)]])
def test_flex_blocks_hold_the_mask(draws, window):
    """Evaluated whole: the mask is the dense one, no block outside the lists has a visible key, a full block all."""
    tree = depth_first(draws)
    tokens = int(tree[1][-1])
    query, key, value = _inputs(tokens, 1, 1)
    _, depths = dense_attention(query, key, value, *tree)
    plan = TreePlan.of(*tree, depths)
    window = plan.effective_window(window)
    at = torch.arange(tokens)
    mask = visible(plan, window)(0, 0, at[:, None], at[None]).numpy()
    path_of = np.zeros((tokens, tokens), bool)
    for s, (start, end) in enumerate(zip(tree[0], tree[1], strict=True)):
        node = s
        while node >= 0:
            path_of[start:end, tree[0][node] : tree[1][node]] = True
            node = tree[2][node]
    behind = depths.numpy()[:, None] - depths.numpy()[None]
    np.testing.assert_array_equal(mask, path_of & (behind >= 0) & (True if window is None else behind < window))
    blocks = block_mask(plan, window)
    for q in range(-(-tokens // BLOCK)):
        kinds = {}
        for kind, counts, indices in (
            ("partial", blocks.kv_num_blocks, blocks.kv_indices),
            ("full", blocks.full_kv_num_blocks, blocks.full_kv_indices),
        ):
            kinds |= dict.fromkeys(indices[0, 0, q, : counts[0, 0, q]].tolist(), kind)
        for k in range(-(-tokens // BLOCK)):
            tile = mask[q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK]
            assert tile.any() <= (k in kinds)
            assert tile.all() or kinds.get(k) != "full"


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, 1.5)])
def test_flex_equals_the_dense_mask_forward(window, softcap):
    tree = depth_first([(130, 0), (67, 0), (31, 1)])
    inputs = [x.detach() for x in _inputs(int(tree[1][-1]), dtype=torch.float32)]
    expected, depths = dense_attention(*inputs, *tree, window, softcap)
    got = Flex().attend(*inputs, TreePlan.of(*tree, depths), window, softcap, 6**-0.5)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_flex_in_a_model_gives_the_log_probs_of_the_reference(family):
    def flex(
        module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, tree_plan=None, **kwargs
    ):
        return Flex().attend(query, key, value, tree_plan, sliding_window, softcap, scaling), None

    hf.AttentionInterface.register("flex_forward", flex)
    hf.AttentionMaskInterface.register("flex_forward", lambda *args, **kwargs: None)
    row = DeviceRow.of(make_row([*group(1, [7, 11, 13]), *group(2, [5, 3], prompt=9, group_id=1)]), "cpu")
    with torch.no_grad():
        got, expected = (
            token_terms(make_model(family, name), row, 0.7, want_head=True).trainer_logprobs
            for name in ("flex_forward", attention.NAME)
        )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_varlen_is_called_as_its_signature_asks():
    """On the meta device, which has shapes and no values, forward and backward."""
    plan = TreePlan.of(*EXAMPLE, torch.zeros(8, dtype=torch.long))
    query, key, value = (
        torch.randn(1, heads, 8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    arrays = {name: getattr(plan.paths, name).to("meta") for name in ("index", "query_starts", "key_starts")}
    moved = dataclasses.replace(plan.paths, **arrays)
    plan._kept["paths"] = moved
    for window in (None, 3):
        out = attention.BACKENDS["varlen"].attend(query, key, value, plan, window, None, 0.25)
        assert out.shape == (1, 8, 4, 16)
        grads = torch.autograd.grad(out.sum(), (query, key, value))
        assert [g.shape for g in grads] == [x.shape for x in (query, key, value)]


def _case(**changes) -> Case:
    facts = dict(device="cuda", capability=9.0, dtype=torch.bfloat16, head_dim=128, value_dim=128)
    return Case(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"device": "cpu", "capability": None}, "torch", "first choice"),
        ({}, "varlen", "fa3: the package kernels is not installed"),
        ({"capability": 10.0}, "varlen", "fa4: the package kernels is not installed"),
        ({"window": 512}, "varlen", ""),
        ({"softcap": 50.0}, "flex", "varlen: it has no softcap"),
        ({"dtype": torch.float32}, "flex", "varlen: it needs bfloat16 or float16, not float32"),
        ({"dtype": torch.float32, "head_dim": 256, "value_dim": 256}, "torch", "flex: it needs a head dimension"),
        ({"head_dim": 100, "value_dim": 100}, "flex", "multiple of 8"),
        ({"capability": 7.5, "dtype": torch.float16}, "flex", "compute capability 8.0"),
        ({"copies": MANY_COPIES + 1}, "flex", "first choice"),
        ({"capability": None}, "varlen", "aiter: the package kernels is not installed"),
        ({"capability": None, "window": 512}, "flex", "AMD"),
    ],
)
def test_the_rule(changes, name, reason, monkeypatch):
    find = importlib.util.find_spec  # as on a machine with triton and without the package kernels
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda module: {"kernels": None, "triton": "there"}[module] if module in ("kernels", "triton") else find(module),
    )
    chosen, why = choose(_case(**changes), attention.BACKENDS)
    assert chosen.name == name
    assert reason in why


def test_a_named_back_end_that_cannot_run_the_model_is_refused_in_one_line():
    config = make_model("gemma2").config
    lines = attention.check(config, "auto", "cpu", torch.bfloat16)
    assert lines == [
        "full attention: back end torch (the first choice for cpu)",
        "sliding window of 5: back end torch (the first choice for cpu)",
    ]
    with pytest.raises(ConfigError, match=r"^model.attention_backend=sdpa cannot run .* no softcap .*; use auto$"):
        attention.check(config, "sdpa", "cpu", torch.float32)
    with pytest.raises(ConfigError, match="backward pass needs a GPU"):
        attention.check(make_model("qwen3").config, "flex", "cpu", torch.float32)
    with pytest.raises(ConfigError, match="model.attention_backend=varlen cannot run this model here: it needs a GPU"):
        token_terms(
            make_model("qwen3", attention.implementation("varlen")),
            DeviceRow.of(make_row(group(1, [3, 5])), "cpu"),
            1.0,
            want_head=False,
        )
